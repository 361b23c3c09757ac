#!/usr/bin/env bash
# Prints the line coverage of runtime/ and io_uring/ by the C++ tests, and by the Python tests where asked for.
#
#   tools/coverage.sh [--python] [CTEST OPTION...]
#
# --python          also the Python suite, against a package that is built for it in build/venv-coverage.
# CTEST OPTION...   for example `-L unit`; default: every test but rules, measurements and planted bugs.
#
# Counters lie in mapped files: a forked child and a process that is killed count as well. The lines right behind a fork,
# in the same function, may count as missed. The table is build/coverage/coverage.txt; build/coverage/lines.txt has each
# line with its count. HOLDFAST_COVERAGE_MIN=92 makes a lower share a failure.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

python=no
case "${1:-}" in
  -h | --help) print_help ;;
  --python)
    python=yes
    shift
    ;;
esac
[ $# -gt 0 ] || set -- -LE 'tidy|perf|planted'
install_missing "${packages_build[@]}" "${packages_test[@]}"

build=$root/build/coverage
raw=$build/raw
rm -rf "$raw"
mkdir -p "$raw"
say "== build"
cmake --preset coverage >/dev/null
# A build of some tests is kept as it is: HOLDFAST_COVERAGE_TARGETS names them.
read -ra targets <<<"${HOLDFAST_COVERAGE_TARGETS:-}"
cmake --build --preset coverage -j "$(build_jobs)" ${targets[0]:+--target "${targets[@]}"} >"$build/build.log" || {
  tail -n 40 "$build/build.log"
  fail "the build failed; all of its output is in $build/build.log"
}
# One file for each program, whose processes count in it together.
export LLVM_PROFILE_FILE=$raw/%m%c.profraw
say "== C++ tests"
status=0
ctest --preset coverage "$@" >"$build/tests.log" 2>&1 || status=$?
grep -E '^[0-9]+% tests passed|^[[:space:]]+[0-9]+ - ' "$build/tests.log" || tail -n 5 "$build/tests.log"
modules=()
if [ "$python" = yes ]; then
  say "== Python tests"
  venv=$root/build/venv-coverage
  flags="-O1 -fprofile-instr-generate -fcoverage-mapping -mllvm -runtime-counter-relocation"
  CC=clang-14 CXX=clang++-14 CXXFLAGS=$flags HOLDFAST_VENV=$venv tools/venv.sh
  "$venv/bin/python" -m pytest tests/python -q >"$build/python.log" 2>&1 || status=$?
  tail -n 3 "$build/python.log"
  while IFS= read -r file; do modules+=(-object "$file"); done < <(
    find "$venv"/lib/python3*/site-packages/holdfast -name '_native*.so' -o -path '*/bin/*' -type f
  )
fi
profiles=("$raw"/*.profraw)
[ -e "${profiles[0]}" ] || fail "no test has run"
llvm-profdata-14 merge -sparse -o "$build/all.profdata" "${profiles[@]}"
while IFS= read -r file; do modules+=(-object "$file"); done < <(
  find "$build" -type f -perm -u+x ! -name '*.so*' ! -path '*/CMakeFiles/*' ! -name '*.py' ! -name '*.sh'
)
# What is not compiled into a program that was built has no lines here.
sources=(-ignore-filename-regex='(/tests/|/usr/|/tools/|/examples/)')
llvm-cov-14 show "${modules[@]}" -instr-profile="$build/all.profdata" "${sources[@]}" >"$build/lines.txt" 2>/dev/null
llvm-cov-14 export -summary-only "${modules[@]}" -instr-profile="$build/all.profdata" "${sources[@]}" 2>/dev/null |
  python3 "$root/tools/coverage_table.py" "$root" "${HOLDFAST_COVERAGE_MIN:-0}" | tee "$build/coverage.txt"
exit "$status"
