#!/bin/sh
# Installs the package into an empty prefix, moves it, and builds and runs a project against it, by find_package and by
# pkg-config. Usage: consume.sh BUILD_DIRECTORY CMAKE CXX_COMPILER [BUILD_TYPE [EMULATOR]]
set -eu
build=$1
cmake=$2
compiler=$3
type=${4:-Release}
if [ -n "${5:-}" ]; then
  echo "skipped: the consumer's own build knows no tool chain for another processor"
  exit 77
fi
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d "${TMPDIR:-/tmp}/holdfast-consumer.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

# Installed in one place and used in another: nothing in the package may know where it was made.
"$cmake" --install "$build" --prefix "$scratch/made" >"$scratch/install.log" || {
  cat "$scratch/install.log"
  exit 1
}
mv "$scratch/made" "$scratch/prefix"
prefix=$scratch/prefix
if grep -rlF "$scratch/made" "$prefix/lib" --include='*.cmake' --include='*.pc'; then
  echo "the files above name the place where the package was made"
  exit 1
fi
test -x "$prefix/libexec/holdfast/holdfast-worker" || {
  echo "holdfast-worker is not installed"
  exit 1
}
HOLDFAST_WORKER=$prefix/libexec/holdfast/holdfast-worker
export HOLDFAST_WORKER

mkdir "$scratch/run"
cd "$scratch/run"

echo "== find_package"
"$cmake" -S "$here/project" -B "$scratch/project" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE="$type" \
  -DCMAKE_CXX_COMPILER="$compiler" >"$scratch/configure.log" || {
  cat "$scratch/configure.log"
  exit 1
}
"$cmake" --build "$scratch/project"
"$scratch/project/example" .
"$scratch/project/cuda_example"

echo "== pkg-config"
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name holdfast.pc)")
export PKG_CONFIG_PATH
pkg-config --exists --print-errors holdfast
rm -rf ./*
# shellcheck disable=SC2046 # pkg-config's answer is a list of words.
"$compiler" -std=c++20 $(pkg-config --cflags holdfast) "$here/example.cc" -o "$scratch/example" \
  $(pkg-config --libs holdfast)
"$scratch/example" .
test "$(pkg-config --variable=worker_program holdfast | xargs realpath)" = "$(realpath "$HOLDFAST_WORKER")"
