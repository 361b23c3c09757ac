#!/usr/bin/env bash
# Installs what is missing, builds the programs, and runs the demo: a training loop whose state changes while checkpoints
# of it are saved, and are verified afterwards.
#
#   tools/quickstart.sh [FILE.safetensors] [DEMO OPTION...]
#
# FILE.safetensors   the tensors to train with; without it a state of GPT-2's size (1.4 GiB) is made up.
# Checkpoints go to a new folder below ./holdfast-demo-checkpoints, or, if there is no room for them, below $TMPDIR or
# /tmp; $HOLDFAST_DEMO_DIR names another place. The folder of the run before is removed first; that of this run stays, to
# look at. Every option of build/release/tools/holdfast-demo --help can follow.
# HOLDFAST_WHEELS names a folder of wheels by tools/build-wheels.sh: the demo is taken from there, and nothing is built.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-}" in
  -h | --help) print_help ;;
esac
file=
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  file=$(realpath -e -- "$1" 2>/dev/null) || fail "$1: no such file"
  [ -f "$file" ] && [ -r "$file" ] || fail "$1: not a file that can be read"
  shift
fi

# Each makes the demo and sets `programs`, the folder that it is in.
demo_of_wheel() {
  install_missing python3-venv
  say "== install"
  local venv=$root/build/venv-quickstart
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-index --no-deps --force-reinstall \
    --find-links "$HOLDFAST_WHEELS" holdfast || fail "$HOLDFAST_WHEELS has no wheel of holdfast for $(python3 --version)"
  programs=$("$venv/bin/python" -c 'from holdfast import _programs; print(_programs.program(""))')
}

demo_of_build() {
  install_missing "${packages_build[@]}"
  say "== build"
  local build=$root/build/release tests= log=$root/build/quickstart.log
  # A build folder that already has the tests keeps them; the programs are all that is built here.
  if [ -f "$build/CMakeCache.txt" ]; then
    tests=$(sed -n 's/^HOLDFAST_TESTS:[A-Z]*=//p' "$build/CMakeCache.txt")
  fi
  mkdir -p "$root/build"
  (cd "$root" && cmake --preset release -DHOLDFAST_TESTS="${tests:-OFF}") >"$log" 2>&1 || {
    cat "$log"
    fail "CMake could not configure the build; its output is above"
  }
  cmake --build "$build" --target programs -j "$(build_jobs)"
  programs=$build/tools
}

if [ -n "${HOLDFAST_WHEELS:-}" ]; then
  demo_of_wheel
else
  demo_of_build
fi

# A place that the caller names among the demo's options is the caller's business.
for argument in "$@"; do
  case "$argument" in
    --dir | --dir=*) exec "$programs/holdfast-demo" ${file:+"$file"} "$@" ;;
  esac
done

# The demo keeps all its checkpoints to verify them: five times the state is ample.
state=$((1500 << 20))
[ -z "$file" ] || state=$(stat -c %s -- "$file")
needed=$((5 * state + (64 << 20)))
mark=.made-by-holdfast-quickstart # a folder without it is somebody's own
directory=
for candidate in "${HOLDFAST_DEMO_DIR:-}" "$PWD/holdfast-demo-checkpoints" \
  "${TMPDIR:-/tmp}/holdfast-demo-checkpoints" /var/tmp/holdfast-demo-checkpoints; do
  [ -n "$candidate" ] && mkdir -p -- "$candidate" 2>/dev/null && [ -w "$candidate" ] || continue
  for old in "$candidate"/run.??????; do
    [ ! -f "$old/$mark" ] || rm -rf -- "$old"
  done
  if [ "$(df --output=avail -B1 -- "$candidate" | tail -n 1)" -ge "$needed" ]; then
    directory=$(mktemp -d -- "$candidate/run.XXXXXX")
    break
  fi
  rmdir -- "$candidate" 2>/dev/null || true
  # A place that was named is used or refused, never replaced by another.
  [ "$candidate" != "${HOLDFAST_DEMO_DIR:-}" ] || break
done
[ -n "$directory" ] || fail "No folder with $((needed >> 20)) MiB free; name one with HOLDFAST_DEMO_DIR."
touch -- "$directory/$mark"

say "== demo"
status=0
"$programs/holdfast-demo" ${file:+"$file"} --dir "$directory" "$@" || status=$?
printf '\nThe checkpoints are in %s; verify them again with\n  %q %q/*\nand remove them with rm -r.\n' \
  "$directory" "$programs/verify-checkpoint" "$directory"
exit "$status"
