# What the scripts here have in common. Sourced, never run.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export DEBIAN_FRONTEND=noninteractive
# The compiler's cache then knows a file of build/release again in the build of the Python package.
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$root}

# Debian 12 packages, by what they are for.
packages_build=(cmake g++ libabsl-dev libcli11-dev libisal-dev liburing-dev libxxhash-dev ninja-build
  nlohmann-json3-dev pkg-config zlib1g-dev)
packages_python=(python3 python3-dev python3-venv)
packages_test=(bindfs binutils btrfs-progs ccache clang-14 clang-format-14 libbenchmark-dev libclang-rt-14-dev
  libgmock-dev libgtest-dev lld-14 xfsprogs)

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
if ! [ -t 1 ]; then
  say() { printf '\n%s\n' "$*"; }
fi

# The comment at the head of the script that was called, and its end. The path is whole: scripts change the folder.
called=$(realpath -- "${BASH_SOURCE[-1]}")
print_help() {
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$called"
  exit 0
}

fail() {
  printf '%s\n' "$*" >&2
  exit 1
}

# read_options OPTIONS ARGUMENT...: sets the variable that is named like each option. OPTIONS are words: `out=` is --out VALUE, `write` is
# --write alone, which is then the variable's value.
read_options() {
  local options=" $1 " option
  shift
  while [ $# -gt 0 ]; do
    option=${1#--}
    case "$1 $options" in
      -h\ * | --help\ *) print_help ;;
      "--$option "*" $option "*) printf -v "$option" %s "$1" ;;
      "--$option "*" $option= "*) [ $# -ge 2 ] || fail "$1: see tools/${called##*/} --help" && printf -v "$option" %s "$2" && shift ;;
      *) fail "$1: see tools/${called##*/} --help" ;;
    esac
    shift
  done
}

# install_missing PACKAGE...: makes sure that the packages are there. Asks apt for its lists only when it has to.
install_missing() {
  local package missing=()
  if ! command -v dpkg-query >/dev/null; then
    echo "This is no Debian: the packages are assumed to be here under other names: $*"
    return
  fi
  for package in "$@"; do
    if [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
      missing+=("$package")
    fi
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  local sudo=()
  if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
      sudo=(sudo -n env DEBIAN_FRONTEND=noninteractive)
    else
      fail "These packages are missing, and installing them needs root:

    sudo apt-get install ${missing[*]}

Run that, then this script again."
    fi
  fi
  say "Installing: ${missing[*]}"
  local install=("${sudo[@]}" apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0)
  # A first try with the lists that are here; they may be missing, or name versions that are gone.
  if ! "${install[@]}" "${missing[@]}" >/dev/null 2>&1 </dev/null; then
    "${sudo[@]}" apt-get update -qq </dev/null || fail "apt-get update failed: is there a network?"
    "${install[@]}" "${missing[@]}" </dev/null >/dev/null ||
      fail "apt-get could not install: ${missing[*]}"
  fi
}

# debian_mirror: where this machine's apt takes Debian's packages from; HOLDFAST_DEBIAN_MIRROR names another.
debian_mirror() {
  local found=${HOLDFAST_DEBIAN_MIRROR:-$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' | head -n 1)}
  [ -n "$found" ] || fail "apt knows no source of Debian's packages: set HOLDFAST_DEBIAN_MIRROR"
  echo "$found"
}

# debian_sources FOLDER PACKAGE...: unpacks Debian 12's source packages there once, verified and patched by apt-get and dpkg-source. The
# lists and sources of apt are the folder's own; those of the machine stay as they are.
debian_sources() {
  local folder=$1
  shift
  [ ! -f "$folder/complete" ] || return 0
  say "Fetching sources: $*"
  rm -rf "$folder" && mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
  echo "deb-src $(debian_mirror) bookworm main" >"$folder/sources.list"
  local apt=(apt-get -qq -o Dir::Etc::sourcelist="$folder/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::Lists="$folder/lists"
    -o Dir::Cache="$folder/cache" -o APT::Sandbox::User=root)
  "${apt[@]}" update && (cd "$folder" && "${apt[@]}" source "$@") || fail "apt-get source could not fetch: $*: is there a network?"
  touch "$folder/complete"
}

# build_jobs: compilers to run at once; one for each CPU, fewer when memory is short (1.5 GiB each).
build_jobs() {
  local cpus by_memory
  cpus=$(nproc)
  by_memory=$(awk '/^MemAvailable:/ {print int($2 / 1572864)}' /proc/meminfo)
  [ "$by_memory" -ge 1 ] || by_memory=1
  echo $((cpus < by_memory ? cpus : by_memory))
}
