#!/usr/bin/env bash
# Prints the line coverage of runtime/ and io_uring/ by the C++ tests, and by the Python tests where asked for.
#
#   tools/coverage.sh [--python | --launchers] [CTEST OPTION...]
#
# --python          also the Python suite, against a package that is built for it in build/venv-coverage.
# --launchers       four runs: each without the tests of the other three launchers. A table of four lines.
# CTEST OPTION...   for example `-L unit`; default: every test but rules, measurements and planted bugs.
#
# Counters lie in mapped files: a forked child and a process that is killed count as well. The lines right behind a fork,
# in the same function, may count as missed. The table is build/coverage/coverage.txt; build/coverage/lines.txt has each
# line with its count. HOLDFAST_COVERAGE_MIN=92 makes a lower share a failure.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

python=no launchers=
case "${1:-}" in
  -h | --help) print_help ;;
  --python)
    python=yes
    shift
    ;;
  --launchers)
    launchers="Spawn Persistent Fork Thread"
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
status=0
cpp_tests() { # CTEST OPTION...
  say "== C++ tests${GTEST_FILTER:+ $GTEST_FILTER}"
  ctest --preset coverage "$@" >"$build/tests.log" 2>&1 || status=$?
  grep -E '^[0-9]+% tests passed|^[[:space:]]+[0-9]+ - ' "$build/tests.log" || tail -n 5 "$build/tests.log"
}
# What is not compiled into a program that was built has no lines here.
sources=(-ignore-filename-regex='(/tests/|/usr/|/tools/|/examples/)')
modules=()
while IFS= read -r file; do modules+=(-object "$file"); done < <(
  find "$build" -type f -perm -u+x ! -name '*.so*' ! -path '*/CMakeFiles/*' ! -name '*.py' ! -name '*.sh'
)
# counted: the table of all processes that have run.
counted() {
  local profiles=("$raw"/*.profraw)
  [ -e "${profiles[0]}" ] || fail "no test has run"
  rm -f "$build/all.profdata"
  llvm-profdata-14 merge -sparse -o "$build/all.profdata" "${profiles[@]}" || return
  llvm-cov-14 export -summary-only "${modules[@]}" -instr-profile="$build/all.profdata" "${sources[@]}" 2>/dev/null |
    python3 "$root/tools/coverage_table.py" "$root" "${HOLDFAST_COVERAGE_MIN:-0}"
}

if [ -n "$launchers" ]; then
  echo '| launcher | lines | executed | % |' >"$build/coverage.txt"
  echo '| --- | ---: | ---: | ---: |' >>"$build/coverage.txt"
  for launcher in $launchers; do
    rm -f "$raw"/*
    others=$(printf '%s\n' $launchers | grep -vx "$launcher" | sed 's|.*|*.*/&*|' | paste -sd :)
    GTEST_FILTER=-$others cpp_tests "$@"
    counted >"$build/$launcher.txt" || status=$?
    sed -n "s/^| all |/| $launcher |/p" "$build/$launcher.txt" >>"$build/coverage.txt"
  done
  cat "$build/coverage.txt"
  exit "$status"
fi

cpp_tests "$@"
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
counted >"$build/coverage.txt" || status=$?
cat "$build/coverage.txt"
llvm-cov-14 show "${modules[@]}" -instr-profile="$build/all.profdata" "${sources[@]}" >"$build/lines.txt" 2>/dev/null
exit "$status"
