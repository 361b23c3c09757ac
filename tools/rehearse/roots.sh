# The root file systems of tools/rehearse.sh and tools/emulator-campaign.sh, and PyTorch for them. Sourced, never run; $work is the folder
# in which the file systems stand.
# shellcheck shell=bash

# What builds a Python, for systems whose own is too old for the package.
builders=gcc,libc6-dev,libbz2-dev,libexpat1-dev,libffi-dev,liblzma-dev,libssl-dev,make,zlib1g-dev

# root_file_system TREE SUITE PACKAGES SOURCE OPTION...: the packages of a distribution, and what they need; options of mmdebstrap.
root_file_system() {
  say "Making the root file system ${1##*/}"
  rm -rf "$1"
  mmdebstrap -q "${@:5}" --variant=minbase --dpkgopt=force-unsafe-io --include="$3" "$2" "$1" "$4" || fail "mmdebstrap could not make ${1##*/}: is there a network?"
}

# torch VERSION: the folder of packages with PyTorch for a Python.
torch() {
  local given=HOLDFAST_REHEARSE_TORCH_${1/./_} folder=$root/build/rehearse/torch-$1
  if [ -n "${!given:-}" ]; then
    echo "${!given}"
  elif [ -f "$folder.complete" ] || { python3 -m pip --disable-pip-version-check install -q --target "$folder" --upgrade --python-version "$1" \
    --only-binary=:all: 'torch>=2.9' 'numpy<3' </dev/null >&2 && touch "$folder.complete"; }; then
    echo "$folder"
  else
    fail "pip could not fetch PyTorch for Python $1: is there a network?"
  fi
}

# file_system NAME: makes $work/NAME once.
file_system() {
  local name=$1 tree=$work/$1 packages=ca-certificates,python3,python3-venv source options=()
  [ ! -f "$tree.complete" ] || return 0
  case "$name" in
    bookworm | trixie | jammy) ;;
    forky) options=(--aptopt='Acquire::Check-Valid-Until "false"') ;; # of a release to come; a mirror may be some weeks behind
    bullseye) packages=ca-certificates,$builders ;;
    *) fail "--systems $name: see tools/rehearse.sh --help" ;;
  esac
  case "$name" in
    jammy)
      [ -n "${HOLDFAST_UBUNTU_MIRROR:-}" ] || fail "--systems $name: set HOLDFAST_UBUNTU_MIRROR to a mirror of Ubuntu's packages"
      local keyring=${HOLDFAST_UBUNTU_KEYRING:-/usr/share/keyrings/ubuntu-archive-keyring.gpg}
      [ -f "$keyring" ] || fail "--systems $name: $keyring is no file; set HOLDFAST_UBUNTU_KEYRING to the one of Ubuntu's package ubuntu-keyring"
      source="deb [signed-by=$keyring] $HOLDFAST_UBUNTU_MIRROR $name main universe"
      ;;
    *) source="deb $(debian_mirror) $name main" ;;
  esac
  root_file_system "$tree" "$name" "$packages" "$source" "${options[@]}"
  mkdir -p "$tree"/{wheels,torch,rehearse,run/volume,home/user,build}
  [ "${packages/gcc,/}" = "$packages" ] || build_python "$tree"
  rm -rf "$tree/build"
  touch "$tree.complete"
}

# build TREE COMMANDS: in the root file system's folder /build, with its own compiler. Python's configure looks for a /dev/shm.
build() {
  bwrap --bind "$1" / --dev /dev --proc /proc --unshare-pid --die-with-parent --chdir /build --clearenv --setenv MAKEFLAGS "-s -j$(build_jobs)" \
    --setenv PATH /usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -ec "$2" >"$1.log" 2>&1 || {
    tail -n 20 "$1.log"
    fail "a build in $1 failed; all of the output is in $1.log"
  }
}

# build_python TREE: Debian 12's Python. That source is without the wheels of pip and setuptools, which its `venv` installs.
build_python() {
  local wheels=usr/share/python-wheels
  say "Building Python for $1"
  python3 -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: --dest "$1/$wheels" pip setuptools </dev/null ||
    fail "pip could not fetch its wheel: is there a network?"
  debian_sources "$work/sources" python3.11
  cp -r "$(find "$work/sources" -maxdepth 1 -type d -name 'python3.11-*')" "$1/build/python"
  # Debian's pyexpat compiles as a part of the interpreter alone.
  build "$1" "cd python && echo pyexpat pyexpat.c -lexpat >Modules/Setup.local && ./configure -q --disable-test-modules --with-system-expat \
    --with-ensurepip=no --with-wheel-pkg-dir=/$wheels && make && make install &&
    python3 -c 'import bz2, ctypes, lzma, multiprocessing.synchronize, pyexpat, ssl, venv, zlib'"
}
