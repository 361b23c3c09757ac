#!/usr/bin/env bash
# Attacks Holdfast on this machine for hours, and writes one report that says whether it can be trusted here.
#
#   tools/campaign.sh HOURS DIR [--seed N] [--parts NAME,...] [--write]
#
# HOURS    of testing, after the builds; 0.1 is a rehearsal of six minutes. Root sees more: small file systems, limits.
# DIR      on the file system to try. The report is DIR/report.md; each part's log and report stand beside it.
# --parts  which share the time (default: all), one after the other:
#
#   rounds      integrity-fuzz through all doors
#   program     through the C++ program alone, which is fastest
#   steps       faults and kills at every step of scripts
#   pairs       two of these at a time
#   savers      the same rounds with other savers
#   power_cuts  of rounds on recorded disks
#   tests       of the runtime: faults, kills and hostile allocators, without their usual end
#   fuzzers     of every parser
#   coverage    by all tests; left out of campaigns below four hours that do not name it
#
# --write  adds what was done to docs/campaigns.json, and writes the sums into docs/integrity.md.
#
# Exit status 0 if no part found anything, 1 otherwise.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case "${1:-}" in
  '' | -h | --help) print_help ;;
esac
[ $# -ge 2 ] || fail "usage: tools/campaign.sh HOURS DIR [--seed N] [--parts NAME,...] [--write]"
hours=$1 directory=$2 seed=$RANDOM parts= write=
shift 2
read_options 'seed= parts= write' "$@"
seconds=$(awk -v hours="$hours" 'BEGIN { if (hours + 0 <= 0) exit 1; printf "%d", hours * 3600 }') ||
  fail "HOURS is $hours; it must be a number above 0"
mkdir -p "$directory"
out=$(realpath -- "$directory")
cd "$root"
install_missing "${packages_build[@]}" "${packages_python[@]}" "${packages_test[@]}"

# Shares of the time of all parts.
declare -A shares=([rounds]=18 [program]=8 [steps]=12 [pairs]=2 [savers]=10 [power_cuts]=12 [tests]=24 [fuzzers]=14 [coverage]=0)
: "${parts:=rounds,program,steps,pairs,savers,power_cuts,tests,fuzzers$([ "$seconds" -lt 14400 ] || echo ,coverage)}"
all=0
for name in ${parts//,/ }; do
  [ -n "${shares[$name]:-}" ] || fail "--parts: there is no $name; see tools/campaign.sh --help"
  all=$((all + shares[$name]))
done
wanted() { [[ ,$parts, == *,$1,* ]]; }
# share PART [OF]: the seconds of a part, or its OF-th share.
share() { echo $((seconds * shares[$1] / (all > 0 ? all : 1) / ${2:-1})); }

report=$out/report.md
lanes=1
: >"$out/parts.tsv" >"$out/rows.md"
# part NAME SECONDS COMMAND...: runs a part, which ends by itself or at its time, and keeps its log.
part() {
  local name=$1 longest=$2 result=0 started=$SECONDS verdict
  shift 2
  say "== $name"
  timeout --kill-after=60 "$longest" "$@" >"$out/$name.log" 2>&1 || result=$?
  case "$result" in
    0) verdict="nothing found" ;;
    124 | 137) verdict="ended by its time; nothing found until then" ;;
    *) verdict="**FOUND** (exit status $result)" ;;
  esac
  # What a test found before its time was over counts. What other savers let escape does not.
  if [ "$name" != savers ] && grep -qE '\*\*\*(Failed|Exception)|^ESCAPE' "$out/$name.log"; then
    verdict="**FOUND**"
  fi
  tail -n 3 "$out/$name.log"
  printf '%s\t%s\t%s\n' "$name" "$(((SECONDS - started) / lanes))" "$verdict" >>"$out/parts.tsv"
  echo "| $name | $((SECONDS - started)) s | $verdict | \`$*\` |" >>"$out/rows.md"
}
left_out() { echo "| $1 | 0 s | left out: $2 | |" >>"$out/rows.md"; }

say "== build"
tools/venv.sh
if wanted tests; then
  { cmake --preset release && cmake --build --preset release -j "$(build_jobs)"; } >"$out/build.log" 2>&1 ||
    fail "the runtime's tests could not be built: see $out/build.log"
fi
if wanted fuzzers && { ! cmake --preset fuzz || ! cmake --build --preset fuzz -j "$(build_jobs)"; } >>"$out/build.log" 2>&1; then
  left_out fuzzers "the preset fuzz could not be built (see build.log)"
  parts=${parts//fuzzers/}
fi

bin=build/venv/bin
cpus=$(nproc)
at_once=$((cpus < 8 ? 4 * cpus : cpus + 24)) # rounds wait for most of their time
# fuzz PART OPTION...: integrity-fuzz for the part's time.
fuzz() {
  local name=$1
  shift
  ! wanted "$name" || part "$name" "$(($(share "$name") + 900))" "$bin/integrity-fuzz" --jobs "$at_once" --time "$(share "$name")s" \
    --seed "$seed" --dir "$out" --report "$out/$name.json" "$@"
}
fuzz rounds
# Its processes are small, and wait for most of their time.
fuzz program --jobs $((at_once + 16)) --doors plan --ranks 1 --bytes 32 --tensors 1000
fuzz steps --faults --kills
fuzz pairs --faults --kills --pairs --per-script 20
if wanted savers; then
  part savers "$(($(share savers) + 900))" "$bin/integrity-fuzz" --savers holdfast.dcp,dcp-thread,dcp-process \
    --time "$(share savers 3)s" --seed "$seed" --dir "$out"
fi
if [ "$(id -u)" = 0 ]; then
  fuzz power_cuts --power-cuts ext4,xfs,btrfs
elif wanted power_cuts; then
  left_out power_cuts "mounting a recorded disk needs root"
fi
if wanted tests; then
  export HOLDFAST_LONG=1
  for test in ring_faults dead_writes lifetime_stress worker_fault recovery_crash single_file_crash orphan_worker trainer_killed; do
    part "$test" "$(share tests 8)" ctest --preset release -R "/$test"
  done
fi
if wanted coverage; then # its build and its tests take most of an hour on two CPUs
  part coverage 7200 tools/coverage.sh --python
fi
if wanted fuzzers; then # one on each CPU
  targets=(build/fuzz/fuzz/*_fuzz)
  lanes=$((cpus < ${#targets[@]} ? cpus : ${#targets[@]}))
  longest=$(($(share fuzzers ${#targets[@]}) * lanes))
  for target in "${targets[@]}"; do
    name=$(basename "$target")
    mkdir -p "$out/$name"
    [ "$(jobs -rp | wc -l)" -lt "$lanes" ] || wait -n
    part "$name" "$((longest + 120))" "$target" -max_total_time=$((longest + 1)) -print_final_stats=1 "$out/$name" "fuzz/corpus/${name%_fuzz}" &
  done
  wait
fi

status=0
! grep -qF FOUND "$out/parts.tsv" || status=1
version=$(git describe --always 2>/dev/null || echo unknown)
# Its own pages change with --write.
git diff --quiet HEAD -- . ':!docs' 2>/dev/null || version+=-dirty
[ -z "$write" ] || "$bin/python" -B tools/campaign/sums.py "$out" "$version" "$seed"
{
  echo "# Holdfast on this machine"
  echo
  echo "$(date -u +%F), $(uname -srm), $(nproc) CPUs, seed $seed; $(df --output=fstype "$out" | tail -n 1) at $out;"
  echo "version $version."
  echo
  [ "$status" = 0 ] && echo "**Nothing was found.**" || echo "**Something was found: see the rows and their logs.**"
  echo
  echo "| part | time | result | command |"
  echo "| --- | --- | --- | --- |"
  cat "$out/rows.md"
  echo
  echo "## Rounds"
  echo
  echo '```'
  for name in rounds program; do
    grep -s -v '^[0-9]* rounds in [0-9]* s, ' "$out/$name.log" || true
  done
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
  grep -s '^|' "$out/savers.log" || true
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
