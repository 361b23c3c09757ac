#!/usr/bin/env bash
# Runs the tests of the Python package against an installed wheel, once for each interpreter.
#
#   tools/test-wheels.sh [--wheels DIR] [--python PROGRAM,...] [--torch VERSION] [--write]
#
# --wheels  where the wheels are (default build/wheels/out, where tools/build-wheels.sh leaves them).
# --python  interpreters (default python3.10,python3.11,python3.12).
# --torch   which PyTorch, as in tools/venv.sh (default torch==2.13.0).
# --write   writes a row for each interpreter into the table in docs/python.md, in the place of the row for the same versions.
#
# Each interpreter gets an environment in build/venv-wheel-VERSION. Nothing is built. The summary is that of tools/test.sh.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

wheels=$root/build/wheels/out python=python3.10,python3.11,python3.12 torch=torch==2.13.0 write=
read_options 'wheels= python= torch= write' "$@"
wheels=$(realpath -m -- "$wheels")
compgen -G "$wheels/holdfast-*.whl" >/dev/null || fail "$wheels has no wheels of holdfast: run tools/build-wheels.sh, or name a folder with --wheels"
install_missing "${packages_build[@]}" "${packages_python[@]}" "${packages_test[@]}"

IFS=, read -ra pythons <<<"$python"
results=$root/build/results
mkdir -p "$results"
status=0
for python in "${pythons[@]}"; do
  version=$("$python" -c 'import platform; print(platform.python_version())') || fail "$python: no such interpreter; name others with --python"
  name=wheel-$version
  export HOLDFAST_VENV=$root/build/venv-$name
  HOLDFAST_PYTHON=$python HOLDFAST_WHEELS=$wheels HOLDFAST_TORCH=$torch "$root/tools/venv.sh"
  [ "$("$HOLDFAST_VENV/bin/python" -c 'import platform; print(platform.python_version())')" = "$version" ] ||
    fail "$HOLDFAST_VENV has another Python than $version: remove it"
  say "== $name: tests"
  # Not in the checkout: its folders must not be found in the place of what is installed.
  (cd "$results" && "$HOLDFAST_VENV/bin/python" -B -m pytest "$root/tests/python" -q -n 3 --dist loadfile -o cache_dir="$root/build/pytest-cache-$name" \
    --timeout=600 --timeout-method=signal --junitxml="$results/$name.xml") || status=1
  python3 -B "$root/tools/summarize_tests.py" "$results" "$name" || status=1
  "$HOLDFAST_VENV/bin/python" -B "$root/tools/wheels/suite_row.py" "$results/$name.xml" ${write:+"$root/docs/python.md"}
done
exit "$status"
