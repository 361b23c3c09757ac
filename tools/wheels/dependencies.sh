#!/usr/bin/env bash
# Builds the libraries that the wheels carry, each by its own build, into build/wheels/ARCH/prefix.
#
#   tools/wheels/dependencies.sh ARCH [JOBS [tests]]
#
# tests: also GoogleTest, into build/wheels/ARCH/prefix-tests.
#
# The sources are Debian 12's source packages, verified and patched by apt-get and dpkg-source. Called by build-wheels.sh and
# test-aarch64.sh, which have made build/wheels/ARCH/tools (the compiler) and export the tools' PATH.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"

arch=${1:?usage: tools/wheels/dependencies.sh ARCH [JOBS [tests]]}
jobs=${2:-$(build_jobs)}
for_tests=${3:-}
wheels=$root/build/wheels
sources=$wheels/sources
prefix=$wheels/$arch/prefix
tools=$wheels/$arch/tools
work=$wheels/$arch/work
packages=(abseil cli11 libisal liburing nlohmann-json3 xxhash zlib)
flags="-O2 -fPIC -fvisibility=hidden -ffunction-sections -fdata-sections"

# folder PACKAGE: its unpacked source.
folder() { find "$wheels"/sources* -maxdepth 1 -type d -name "$1-[0-9]*" | head -n 1; }

# copy_of PACKAGE: a copy to build in, of a package that builds inside of its source.
copy_of() {
  rm -rf "${work:?}/$1" && mkdir -p "$work" && cp -a "$(folder "$1")" "$work/$1" && echo "$work/$1"
}

# configure PACKAGE PREFIX OPTION...: by CMake.
configure() {
  local package=$1 into=$2
  shift 2
  cmake -G Ninja -S "$(folder "$package")" -B "$work/$package" -DCMAKE_TOOLCHAIN_FILE="$root/tools/wheels/toolchain.cmake" \
    -DHOLDFAST_WHEEL_ARCH="$arch" -DHOLDFAST_WHEEL_TOOLS="$tools" -DCMAKE_BUILD_TYPE=Release -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
    -DCMAKE_C_VISIBILITY_PRESET=hidden -DCMAKE_CXX_VISIBILITY_PRESET=hidden -DCMAKE_VISIBILITY_INLINES_HIDDEN=ON \
    -DCMAKE_INSTALL_PREFIX="$into" -DCMAKE_INSTALL_LIBDIR=lib -DBUILD_SHARED_LIBS=OFF -DBUILD_TESTING=OFF -Wno-dev \
    -DCMAKE_POLICY_VERSION_MINIMUM=3.5 "$@"
}

# build_and_install PACKAGE: what CMake has configured.
build_and_install() {
  cmake --build "$work/$1" -j "$jobs"
  cmake --install "$work/$1"
}

# by_make ARGUMENT...: make with the compiler by its bare names, as makefiles take no path with a blank.
by_make() { PATH=$tools:$PATH make -s CC=cc AR=ar RANLIB=ranlib "$@"; }

# pc NAME VERSION LIBS: a pkg-config file.
pc() {
  local escaped=${prefix// /\\ }
  mkdir -p "$prefix/lib/pkgconfig"
  printf '%s\n' "Name: $1" "Description: $1" "Version: $2" "Cflags: -I$escaped/include" "Libs: -L$escaped/lib $3" \
    >"$prefix/lib/pkgconfig/$1.pc"
}

# version PACKAGE: upstream's version of a source.
version() { basename "$(folder "$1")" | sed -E "s/^$1-([0-9.]+[0-9]).*/\1/"; }

build() {
  local source
  # Debian links libatomic for processors without wide atomics; Zig's linker does not know the words for it.
  sed -i '/"-latomic"/d' "$sources"/abseil-*/absl/copts/AbseilConfigureCopts.cmake
  configure abseil "$prefix" -DCMAKE_CXX_STANDARD=20 -DABSL_PROPAGATE_CXX_STD=ON -DABSL_ENABLE_INSTALL=ON
  # Half of Abseil is not used: its archives are empty, so that the rest can be installed.
  cmake --build "$work/abseil" -j "$jobs" --target cord hash raw_hash_set status statusor \
    str_format_internal strings time
  sed -n 's/^build \(absl[^ ]*\.a\):.*/\1/p' "$work/abseil/build.ninja" | while read -r archive; do
    [ -f "$work/abseil/$archive" ] || "$tools/ar" cr "$work/abseil/$archive"
  done
  cmake --install "$work/abseil"
  configure nlohmann-json3 "$prefix" -DJSON_BuildTests=OFF
  build_and_install nlohmann-json3
  configure cli11 "$prefix" -DCLI11_BUILD_TESTS=OFF -DCLI11_BUILD_EXAMPLES=OFF -DCLI11_BUILD_DOCS=OFF -DCLI11_PRECOMPILED=OFF
  build_and_install cli11
  mkdir -p "$prefix/include/isa-l" "$prefix/lib"

  source=$(copy_of liburing)
  (cd "$source" && PATH=$tools:$PATH ./configure --cc=cc --cxx=c++ >/dev/null)
  by_make -C "$source/src" ENABLE_SHARED=0 CFLAGS="$flags" liburing.a
  cp -r "$source"/src/include/. "$prefix/include/" && cp "$source/src/liburing.a" "$prefix/lib/"
  pc liburing "$(version liburing)" -luring

  # On x86-64 with the entry points that choose a vector unit at run time.
  local objects=(xxhash.o)
  [ "$arch" != x86_64 ] || objects+=(xxh_x86dispatch.o)
  source=$(copy_of xxhash)
  by_make -C "$source" CFLAGS="$flags" "${objects[@]}"
  (cd "$source" && "$tools/ar" cr "$prefix/lib/libxxhash.a" "${objects[@]}" && cp xxhash.h xxh3.h "$prefix/include/")
  [ "$arch" != x86_64 ] || cp "$source/xxh_x86dispatch.h" "$prefix/include/"
  pc libxxhash "$(version xxhash)" -lxxhash

  # Its CRCs are all that is used.
  source=$(copy_of libisal)
  mkdir -p "$source/bin"
  by_make -C "$source" -f Makefile.unx units=crc host_cpu="$arch" arch="$([ "$arch" = x86_64 ] || echo "$arch")" \
    CC="cc $flags" lib >/dev/null
  cp "$source/include/crc.h" "$source/include/crc64.h" "$prefix/include/isa-l/" && cp "$source/bin/isa-l.a" "$prefix/lib/libisal.a"
  pc libisal "$(version libisal)" -lisal

  # A CRC of two parts from theirs is all that is used.
  source=$(folder zlib)
  cp "$source/zlib.h" "$source/zconf.h" "$prefix/include/"
  # shellcheck disable=SC2086  # words
  (cd "$work" && "$tools/cc" $flags -DHAVE_UNISTD_H -c "$source/crc32.c" -o crc32.o && "$tools/ar" cr "$prefix/lib/libz.a" crc32.o)
}

# The licences of what is linked in, for the wheels' metadata.
licences() {
  mkdir -p "$prefix/licenses"
  local package
  for package in "${packages[@]}"; do
    cp "$(folder "$package")/debian/copyright" "$prefix/licenses/$package.txt"
  done
}

build_for_tests() {
  configure googletest "$prefix-tests" -DCMAKE_CXX_STANDARD=20
  build_and_install googletest
}

# once PREFIX FUNCTION: runs a function that fills the folder, unless it was filled by the same text and compiler.
once() {
  local stamp log=$wheels/$arch/$2.log
  stamp=$(cat "${BASH_SOURCE[0]}" "$root/tools/wheels/toolchain.cmake" "$tools/cc" | sha256sum)
  [ "$(cat "$1/complete" 2>/dev/null)" != "$stamp" ] || return 0
  say "== libraries for $arch, into $1"
  rm -rf "$1"
  # Not as a condition, in which a failed command would not end the function.
  set +e
  (set -e; "$2") >"$log" 2>&1
  local status=$?
  set -e
  [ "$status" = 0 ] || {
    tail -n 40 "$log"
    fail "the libraries for $arch could not be built; all of the output is in $log"
  }
  echo "$stamp" >"$1/complete"
}

build_all() {
  rm -rf "$work"
  build
  licences
}

debian_sources "$sources" "${packages[@]}"
once "$prefix" build_all
if [ -n "$for_tests" ]; then
  debian_sources "$sources-tests" googletest
  once "$prefix-tests" build_for_tests
fi
