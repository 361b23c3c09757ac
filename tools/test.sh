#!/usr/bin/env bash
# Installs what is missing, builds, and runs the tests.
#
#   tools/test.sh           python: the package, with PyTorch; frameworks: the package with Megatron-Core, Lightning,
#                           nvidia-resiliency-ext and torchtitan; release: the C++ tests (g++) without those of single rooms;
#                           then asan+ubsan and tsan: the tests of the runtime that can run under them (below, and
#                           tests/README.md), by clang 14, which compiles them in half of g++'s time. About half an hour on
#                           two cores.
#   tools/test.sh --full    {g++, clang 14} x {none, asan+ubsan, tsan}, the fuzzers for a moment, and the long runs
#                           (HOLDFAST_LONG=1). Hours.
#   tools/test.sh --retry   tests that fail run a second time, one at a time. Those that pass then are listed as unstable and do not
#                           fail the command: for machines that others load.
#   tools/test.sh PASS...   only these passes: python, release, asan, tsan, clang, clang-asan, clang-tsan, fuzz, debug,
#                           frameworks.
#
# The pass frameworks installs Megatron-Core, Lightning and others from PyPI. If that fails, for example without a
# network, the pass is left out, and the summary says so.
#
# Each pass builds in build/PASS (python: in build/venv). Ends with one summary; exit status 0 if nothing failed.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

retry=
if [ "${1:-}" = --retry ]; then
  retry=1
  shift
fi
case "${1:-}" in
  -h | --help) print_help ;;
  --full)
    [ $# = 1 ] || fail "--full runs every pass; name none"
    export HOLDFAST_LONG=1
    passes=(python frameworks release asan tsan clang clang-asan clang-tsan fuzz)
    ;;
  -*) fail "unknown option $1; see tools/test.sh --help" ;;
  '') passes=(python frameworks release clang-asan clang-tsan) ;;
  *) passes=("$@") ;;
esac
for pass in "${passes[@]}"; do
  [ "$pass" = python ] || [ "$pass" = frameworks ] || cmake --list-presets=test | grep -q "\"$pass\"" || fail "no pass $pass; see tools/test.sh --help"
done
install_missing "${packages_build[@]}" "${packages_python[@]}" "${packages_test[@]}"

# What a failed assertion of a sanitizer does: it ends the program, so that the test fails. A forked child's leak check
# is off: it would wait for threads that the child does not have. A smaller quarantine and TSan's shadow memory of huge
# pages save a fifth of the time in the kernel.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:halt_on_error=1:abort_on_error=0:quarantine_size_mb=16}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1:halt_on_error=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1:no_huge_pages_for_shadow=0}

results=$root/build/results
mkdir -p "$results"
rm -f "$results"/*.xml
jobs=$(build_jobs)
# On any machine: most of the tests' time is waiting. What runs alone says so (RUN_SERIAL).
tests_at_once=12
pytest_at_once=7
status=0

# Beside a pass with ASan, the tests of single rooms and the fuzzers' moment run there alone.
has_asan=
[[ -n "${HOLDFAST_LONG:-}" || " ${passes[*]} " != *asan\ * ]] || has_asan=1

target_of() { # PASS: what it builds (tests/README.md)
  case "$1" in
    *asan) echo checked_tests ;;
    *tsan) echo threaded_tests ;;
    fuzz) echo all ;;
    *) [ -n "$has_asan" ] && echo other_tests || echo all ;;
  esac
}

# configure_and_build PASS
configure_and_build() {
  cmake --preset "$1" >"$results/$1.configure.log" 2>&1 || {
    cat "$results/$1.configure.log"
    return 1
  }
  cmake --build --preset "$1" -j "$jobs" --target "$(target_of "$1")"
}

# Half of the tests' time is waiting, and an installation takes one processor. Meanwhile the passes behind are built, as far
# as that comes: each pass then builds what is left, and reports what does not build.
ahead=
build_ahead() { # PASS...
  set -m        # a process group of its own, in this session: between sessions priorities may not count
  (
    renice -n 19 -p "$BASHPID"
    for pass; do
      [ "$pass" = python ] || [ "$pass" = frameworks ] || configure_and_build "$pass" || true
    done
  ) >"$results/ahead.log" 2>&1 </dev/null &
  ahead=$!
  set +m
}
end_ahead() {
  [ -z "$ahead" ] || kill -TERM -- "-$ahead" 2>/dev/null || true
  [ -z "$ahead" ] || wait "$ahead" 2>/dev/null || true
  ahead=
}
trap end_ahead EXIT

# The Python package as pip installs it.
has_package=
build_package() {
  [ -n "$has_package" ] || "$root/tools/venv.sh" || return 1
  has_package=1
}

# pytest_in PASS PYTHON: the tests of tests/PASS. A test that hangs fails after ten minutes and shows where; the long runs
# have no limit.
pytest_in() {
  local result=0
  local pytest=("$2" -B -m pytest "$root/tests/$1" -q -o cache_dir="$root/build/pytest-cache-$1")
  [ -n "${HOLDFAST_LONG:-}" ] || pytest+=(--timeout=600 --timeout-method=signal)
  "${pytest[@]}" -n "$pytest_at_once" --dist loadfile --no-loadscope-reorder --junitxml="$results/$1.xml" || result=1
  if [ "$result$retry" = 11 ]; then
    "${pytest[@]}" --last-failed --last-failed-no-failures none --junitxml="$results/$1.retry.xml" && result=0
  fi
  return "$result"
}

python_pass() { # PASS...: the passes behind this one
  local started=$SECONDS built result=0
  build_ahead "$@"
  say "== python: build"
  build_package || return 1
  built=$((SECONDS - started))
  say "== python: tests"
  started=$SECONDS
  pytest_in python "$root/build/venv/bin/python" || result=1
  echo "python: built in $built s, tested in $((SECONDS - started)) s"
  return "$result"
}

# Without its environment the pass is left out: what others publish may be out of reach.
left_out=
frameworks_pass() { # PASS...: as of python_pass
  local started=$SECONDS built result=0
  build_ahead "$@"
  say "== frameworks: build"
  build_package || return 1
  # A network that answers nothing would hold the command for long.
  if ! timeout 600 "$root/tools/venv.sh" --frameworks; then
    left_out="frameworks: left out: its environment could not be made (see above)"
    return 0
  fi
  built=$((SECONDS - started))
  say "== frameworks: tests"
  started=$SECONDS
  pytest_in frameworks "$root/build/venv-frameworks/bin/python" || result=1
  echo "frameworks: built in $built s, tested in $((SECONDS - started)) s"
  return "$result"
}

behind=("${passes[@]}")
for pass in "${passes[@]}"; do
  behind=("${behind[@]:1}")
  end_ahead
  if [ "$pass" = python ] || [ "$pass" = frameworks ]; then
    "${pass}_pass" "${behind[@]}" || status=1
    continue
  fi
  say "== $pass: build"
  started=$SECONDS
  # The source, the package, the programs and the planted bugs are the same under a sanitizer. What forks a process with
  # threads and goes on in the child is left out there: ASan's heap may be locked in such a child for ever, and TSan ends
  # one that starts a thread.
  only=()
  filter='*'
  # Launchers, engines and file systems know nothing of each other: of their combinations, which the release pass runs
  # all, a sanitizer gets each launcher, each engine and each file system; in the long runs all.
  each='-*ForkUring*:*ForkPwrite*:*PersistentUring*:*PersistentPwrite*:*SpawnUring*:*SpawnPwrite*:*FileSystem*Pwrite'
  # A kill or a power cut at every call is the same code again and again.
  each+=':*/Commits.*:Recoveries.*'
  [ -z "${HOLDFAST_LONG:-}" ] || each='*'
  case "$pass" in
    *asan)
      only=(-LE 'tidy|perf|planted|program|fork')
      filter=$each
      ;;
    *tsan)
      only=(-LE 'tidy|perf|planted|program|fork|fault|pure')
      filter=$each
      # What breaks at every call in turn, and a walk over names, is one thread's work. Workers that are processes have the
      # same threads with each launcher.
      [ "$filter" = '*' ] || filter+=':*/Fork:*/ForkFixed:*/Persistent:*/PersistentFixed:*FileSystem*:FaultTest.Any*'
      [ "$filter" = '*' ] || filter+=':Replaced.*:ZipArchiveWalk.*'
      ;;
    fuzz) ;; # has no tests but those
    *) [ -z "$has_asan" ] || only=(-LE 'room|fuzz') ;;
  esac
  if ! configure_and_build "$pass"; then
    echo "$pass: the build failed"
    echo "$pass" >"$results/$pass.broken"
    status=1
    continue
  fi
  rm -f "$results/$pass.broken"
  built=$((SECONDS - started))
  build_ahead "${behind[@]}"
  say "== $pass: tests"
  started=$SECONDS
  ctest=(ctest --preset "$pass" --test-output-size-passed 4000000 --test-output-size-failed 4000000)
  result=0
  GTEST_FILTER=$filter "${ctest[@]}" -j "$tests_at_once" "${only[@]}" --output-junit "$results/$pass.xml" || result=1
  if [ "$result$retry" = 11 ]; then
    GTEST_FILTER=$filter "${ctest[@]}" -j 1 --rerun-failed --output-junit "$results/$pass.retry.xml" && result=0
  fi
  [ "$result" = 0 ] || status=1
  echo "$pass: built in $built s, tested in $((SECONDS - started)) s"
done

say "== summary"
if [ -n "$left_out" ]; then
  # The other passes' results, if there are any.
  read -ra passes <<<"${passes[*]/frameworks/}"
  echo "$left_out"
fi
[ "${#passes[@]}" = 0 ] || python3 -B tools/summarize_tests.py "$results" "${passes[@]}" || status=1
exit "$status"
