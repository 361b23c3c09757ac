#!/usr/bin/env bash
# Attacks Holdfast on this machine for hours, and writes one report that says whether it can be trusted here.
#
#   tools/campaign.sh HOURS DIR [--seed N]
#
# HOURS  of testing, after the builds; 0.1 is a rehearsal of six minutes. Root sees more: small file systems, limits.
# DIR    on the file system to try. The report is DIR/report.md; each part's log and report stand beside it.
#
# The parts, one after the other: integrity-fuzz (a quarter of the time), its faults and kills at every step, power cuts of
# its rounds, the same rounds with other savers, faults, kills and hostile allocators of the runtime's tests (a quarter),
# fuzzers of every parser (the rest), and, from four hours on, the coverage by all tests. Exit status 0 if no part found anything, 1 otherwise.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-}" in
  '' | -h | --help) print_help ;;
esac
[ $# = 2 ] || { [ $# = 4 ] && [ "$3" = --seed ]; } || fail "usage: tools/campaign.sh HOURS DIR [--seed N]"
seconds=$(awk -v hours="$1" 'BEGIN { if (hours + 0 <= 0) exit 1; printf "%d", hours * 3600 }') ||
  fail "HOURS is $1; it must be a number above 0"
mkdir -p "$2"
out=$(realpath -- "$2")
seed=${4:-$RANDOM}
cd "$root"
install_missing "${packages_build[@]}" "${packages_python[@]}" "${packages_test[@]}"

share() { echo $((seconds * $1 / 100)); }

report=$out/report.md
rows=()
status=0
# part NAME SECONDS COMMAND...: runs a part, which ends by itself or at its time, and keeps its log.
part() {
  local name=$1 longest=$2 result=0 started=$SECONDS verdict
  shift 2
  say "== $name"
  timeout --kill-after=60 "$longest" "$@" >"$out/$name.log" 2>&1 || result=$?
  case "$result" in
    0) verdict="nothing found" ;;
    124 | 137) verdict="ended by its time; nothing found until then" ;;
    *)
      verdict="**FOUND** (exit status $result)"
      status=1
      ;;
  esac
  # What a test found before its time was over counts. What other savers let escape does not.
  if [ "$name" != savers ] && grep -qE '\*\*\*(Failed|Exception)|^ESCAPE' "$out/$name.log"; then
    verdict="**FOUND**"
    status=1
  fi
  tail -n 3 "$out/$name.log"
  rows+=("| $name | $((SECONDS - started)) s | $verdict | \`$*\` |")
}
left_out() { rows+=("| $1 | 0 s | left out: $2 | |"); }

say "== build"
tools/venv.sh
cmake --preset release >"$out/build.log" && cmake --build --preset release -j "$(build_jobs)" >>"$out/build.log"
fuzz=$(share 14)
if ! cmake --preset fuzz >>"$out/build.log" 2>&1 || ! cmake --build --preset fuzz -j "$(build_jobs)" >>"$out/build.log" 2>&1; then
  fuzz=0
fi

bin=build/venv/bin
cpus=$(nproc)
at_once=$((cpus < 8 ? 4 * cpus : cpus + 24)) # rounds wait for most of their time
part rounds "$(($(share 26) + 900))" "$bin/integrity-fuzz" --jobs "$at_once" --time "$(share 26)s" --seed "$seed" --dir "$out" --report "$out/rounds.json"
part steps "$(($(share 12) + 900))" "$bin/integrity-fuzz" --jobs "$at_once" --faults --kills --time "$(share 12)s" \
  --seed "$seed" --dir "$out" --report "$out/steps.json"
part pairs "$(($(share 2) + 900))" "$bin/integrity-fuzz" --jobs "$at_once" --faults --kills --pairs --per-script 20 \
  --time "$(share 2)s" --seed "$seed" --dir "$out" --report "$out/pairs.json"
part savers "$(($(share 10) + 900))" "$bin/integrity-fuzz" --savers holdfast.dcp,dcp-thread,dcp-process \
  --time "$(share 3)s" --seed "$seed" --dir "$out"
if [ "$(id -u)" = 0 ]; then
  part power_cuts "$(($(share 12) + 900))" "$bin/integrity-fuzz" --power-cuts ext4,xfs,btrfs --time "$(share 12)s" --seed "$seed"
else
  left_out power_cuts "mounting a recorded disk needs root"
fi
export HOLDFAST_LONG=1
for test in ring_faults dead_writes lifetime_stress worker_fault recovery_crash single_file_crash orphan_worker trainer_killed; do
  part "$test" "$(share 3)" ctest --preset release -R "/$test"
done
if [ "$seconds" -ge 14400 ]; then # its build and its tests take most of an hour on two CPUs
  part coverage 7200 tools/coverage.sh --python
else
  left_out coverage "it is measured in campaigns of four hours and longer; tools/coverage.sh measures it alone"
fi
if [ "$fuzz" = 0 ]; then
  left_out fuzzers "the preset fuzz could not be built (see build.log)"
else
  targets=(build/fuzz/fuzz/*_fuzz)
  for target in "${targets[@]}"; do
    name=$(basename "$target")
    mkdir -p "$out/$name"
    part "$name" "$((fuzz / ${#targets[@]} + 120))" "$target" -max_total_time=$((fuzz / ${#targets[@]} + 1)) -print_final_stats=1 \
      "$out/$name" "fuzz/corpus/${name%_fuzz}"
  done
fi

{
  echo "# Holdfast on this machine"
  echo
  echo "$(date -u +%F), $(uname -srm), $(nproc) CPUs, seed $seed; $(df --output=fstype "$out" | tail -n 1) at $out;"
  echo "version $(git describe --always --dirty 2>/dev/null || echo unknown)."
  echo
  [ "$status" = 0 ] && echo "**Nothing was found.**" || echo "**Something was found: see the rows and their logs.**"
  echo
  echo "| part | time | result | command |"
  echo "| --- | --- | --- | --- |"
  printf '%s\n' "${rows[@]}"
  echo
  echo "## Rounds"
  echo
  echo '```'
  grep -v '^[0-9]* rounds in [0-9]* s, ' "$out/rounds.log" || true
  echo '```'
  echo
  echo "## Faults and kills at every step"
  echo
  echo '```'
  cat "$out/steps.log" "$out/pairs.log" 2>/dev/null || true
  echo '```'
  echo
  echo "## Power cuts"
  echo
  echo '```'
  cat "$out/power_cuts.log" 2>/dev/null || true
  echo '```'
  echo
  echo "## The same rounds with other savers"
  echo
  grep '^|' "$out/savers.log" || true
  echo
  echo "## Line coverage of runtime/ and io_uring/"
  echo
  grep -s '^|' "$out/coverage.log" || echo "not measured"
  echo
  echo "## Fuzzers"
  echo
  for log in "$out"/*_fuzz.log; do
    [ -f "$log" ] || continue
    echo "- $(basename "$log" .log): $(sed -n 's/^stat::number_of_executed_units: */executions: /p' "$log")"
  done
} >"$report"
say "== $report"
sed -n '1,20p' "$report"
exit "$status"
