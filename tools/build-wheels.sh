#!/usr/bin/env bash
# Makes the wheels and the source distribution of the Python package, and checks them.
#
#   tools/build-wheels.sh [--arch ARCH,...] [--python PROGRAM,...] [--out DIR] [--jobs N] [--write]
#
# --arch    x86_64, aarch64 (default: both).
# --python  interpreters to build for (default python3.10,python3.11,python3.12). Each needs its headers and venv. That of 3.12
#           makes the wheel for the stable ABI, which serves all later versions.
# --out     where the wheels go (default build/wheels/out).
# --jobs    compilers to run at once (default: by processors and memory).
# --write   writes the table of what was made into docs/install.md.
#
# The wheels run with glibc 2.28 and later (manylinux_2_28) and carry all other libraries. The compiler is Zig's clang with libc++,
# from PyPI, as all build tools are; the libraries are built from Debian 12's source packages. What the machine must have:
# apt-get, dpkg-dev, make, pkg-config, an x86-64 processor, and a network. Nothing is installed, and root is not needed.
#
# What is there already in build/wheels is used again; remove that folder for a build from nothing.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# shellcheck source=tools/wheels/compiler.sh
source "$root/tools/wheels/compiler.sh"
clean_environment "$@"

arch=x86_64,aarch64 python=python3.10,python3.11,python3.12 out=$root/build/wheels/out jobs=$(build_jobs) write=
read_options 'arch= python= out= jobs= write' "$@"
out=$(realpath -m -- "$out")
IFS=, read -ra archs <<<"$arch"
IFS=, read -ra pythons <<<"$python"
for arch in "${archs[@]}"; do
  case "$arch" in x86_64 | aarch64) ;; *) fail "--arch $arch: x86_64 and aarch64 are known" ;; esac
done
need_programs apt-get dpkg-source dpkg-deb make pkg-config
for python in "${pythons[@]}"; do
  "$python" -c 'import ensurepip, sysconfig, os, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null ||
    fail "$python: no such interpreter, or one without its headers or venv; name others with --python"
done

mkdir -p "$wheels" "$out"
build_tools "${pythons[-1]}"
for python in "${pythons[@]}"; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  environment "python$version" "$python" 'scikit-build-core>=0.10,<1' 'nanobind>=2.4,<3' build
done
use_nasm

# The wheels are built from the source distribution, so that it has all that they need.
say "== source distribution"
rm -rf "$wheels/source" "$wheels/built" && mkdir -p "$wheels/source" "$wheels/built"
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
python=${pythons[-1]}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$wheels/python$version/bin/python" -m build --sdist --no-isolation -o "$wheels/built" "$root" >"$wheels/sdist.log" 2>&1 || {
  tail -n 20 "$wheels/sdist.log"
  fail "the source distribution could not be built"
}
largest=$((8 << 20))
[ "$(stat -c %s "$wheels"/built/holdfast-*.tar.gz)" -le "$largest" ] || {
  tar -tvzf "$wheels"/built/holdfast-*.tar.gz | sort -k3,3nr | head -n 5 || true
  fail "the source distribution has more than $largest bytes: move what is no source out of $root, or name it in .gitignore"
}
tar -xzf "$wheels"/built/holdfast-*.tar.gz -C "$wheels/source" --strip-components=1

for arch in "${archs[@]}"; do
  compiler "$arch"
  "$root/tools/wheels/dependencies.sh" "$arch" "$jobs"
  prefix=$wheels/$arch/prefix
  rm -rf "$wheels/source/licenses" && cp -r "$prefix/licenses" "$wheels/source/licenses"
  # Compiled anew: the times of the sources are the commit's. What does not depend on Python is compiled once.
  rm -rf "${wheels:?}/$arch/build"
  for python in "${pythons[@]}"; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "== wheel for $arch, Python $version"
    settings=(-Ccmake.define.CMAKE_TOOLCHAIN_FILE="$root/tools/wheels/toolchain.cmake"
      -Ccmake.define.HOLDFAST_WHEEL_ARCH="$arch" -Ccmake.define.HOLDFAST_WHEEL_TOOLS="$wheels/$arch/tools"
      -Ccmake.define.CMAKE_CXX_VISIBILITY_PRESET=hidden -Ccmake.define.CMAKE_VISIBILITY_INLINES_HIDDEN=ON
      -Ccmake.define.HOLDFAST_CCACHE=OFF -Cbuild.tool-args=-k0
      -Cbuild-dir="$wheels/$arch/build" -Cinstall.strip=true
      -Cwheel.license-files="LICENSE;licenses/*.txt")
    types=$wheels/python$version/_native.pyi
    if [ "$arch" != "$(uname -m)" ]; then
      # A module of another processor cannot be asked for its types: they are the same.
      [ -f "$types" ] || fail "the wheel for $(uname -m) comes first: its types are those of $arch's"
      settings+=(-Ccmake.define.HOLDFAST_PYTHON_TYPES="$types")
    fi
    # Configured anew: it must find this Python.
    rm -f "$wheels/$arch/build/CMakeCache.txt" "$wheels/$arch/build/CMakeInit.txt"
    log=$wheels/$arch/python$version.log
    env CMAKE_PREFIX_PATH="$prefix" PKG_CONFIG_LIBDIR="$prefix/lib/pkgconfig" CMAKE_BUILD_PARALLEL_LEVEL="$jobs" _PYTHON_HOST_PLATFORM="linux-$arch" \
      SETUPTOOLS_EXT_SUFFIX=".cpython-${version/./}-$arch-linux-gnu.so" \
      "$wheels/python$version/bin/python" -m build --wheel --no-isolation -o "$wheels/built" "${settings[@]}" "$wheels/source" \
      >"$log" 2>&1 || {
      tail -n 40 "$log"
      fail "the wheel could not be built; all of the output is in $log"
    }
    [ "$arch" != "$(uname -m)" ] || find "$wheels/$arch/build" -name _native.pyi -exec cp {} "$types" \;
  done
done

say "== audit"
rm -f "$out"/holdfast-*
cp "$wheels"/built/*.tar.gz "$out/"
for wheel in "$wheels"/built/*.whl; do
  # The platform is what the symbols say: auditwheel knows the names of this machine's processor alone. The inspection has the limit.
  "$wheels/tools/bin/auditwheel" repair --plat auto --only-plat -w "$out" "$wheel" >"$wheels/audit.log" 2>&1 || {
    cat "$wheels/audit.log"
    fail "auditwheel does not accept $wheel"
  }
done
"$wheels/tools/bin/python" "$root/tools/wheels/inspect_wheels.py" $write "$out"
