#!/usr/bin/env bash
# Attacks Holdfast on this machine for hours, and writes one report that says whether it can be trusted here.
#
#   tools/campaign.sh HOURS DIR [--seed N] [--parts NAME,...] [--events KIND,...] [--engines NAME,...] [--write]
#
# HOURS    of testing, after the builds; 0.1 is a rehearsal of six minutes. Root sees more: small file systems, limits.
# DIR      on the file system to try. The report is DIR/report.md; each part's log and report stand beside it.
# --parts  which share the time (default: all), one after the other:
#
#   rounds      integrity-fuzz through all doors
#   megatron    through Megatron-Core, with build/venv-frameworks, which tools/venv.sh --frameworks makes (default: where it is there)
#   program     through the C++ program alone, which is fastest
#   steps       faults and kills at every step of scripts
#   pairs       two of these at a time
#   savers      the same rounds with other savers: PyTorch's, and Megatron-Core's where megatron can run
#   power_cuts  of rounds on recorded disks
#   bad_disks   rounds on disks that run out of room, and on those of device-mapper, where the kernel has it, that lose or refuse
#               writes, misread, or are late
#   planted     tests that a planted bug must turn red, so that the report says that the checks can fail; 2 minutes beside HOURS
#   tests       of the runtime: faults, kills and hostile allocators, without their usual end
#   fuzzers     of every parser
#   coverage    by all tests, at most 2 hours beside HOURS; left out of campaigns below four hours that do not name it
#
# --events  kinds that the rounds of rounds, megatron and program draw (default: all); integrity-fuzz has their names.
# --engines  of these rounds (default: all); integrity-fuzz has their names, too.
# --write  adds what was done to docs/campaigns.json, and writes the sums into docs/integrity.md.
#
# Exit status 0: nothing was found, and every part ran, or was left out because root is missing: then the parts that a user can run
# have all run, and the headline names the others. 1: something was found. 2: nothing was found, and a part did not run, or not to the
# end, for another reason; or the campaign could not begin. A check that did not run must not pass for one that found nothing; where a
# machine cannot run a part, --parts without the part gives 0 again.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
judged=
trap '[ $? != 1 ] || [ -n "$judged" ] || exit 2' EXIT

case "${1:-}" in
  '' | -h | --help) print_help ;;
esac
[ $# -ge 2 ] || fail "usage: tools/campaign.sh HOURS DIR [--seed N] [--parts NAME,...] [--events KIND,...] [--engines NAME,...] [--write]"
hours=$1 directory=$2 seed=$RANDOM parts= events= engines= write=
shift 2
read_options 'seed= parts= events= engines= write' "$@"
seconds=$(awk -v hours="$hours" 'BEGIN { if (hours + 0 <= 0) exit 1; printf "%d", hours * 3600 }') ||
  fail "HOURS is $hours; it must be a number above 0"
mkdir -p "$directory"
out=$(realpath -- "$directory")
cd "$root"
install_missing "${packages_build[@]}" "${packages_python[@]}" "${packages_test[@]}"

# Shares of the time of all parts, in hundredths. Those without one end by themselves.
declare -A shares=([rounds]=17 [megatron]=5 [program]=8 [steps]=11 [pairs]=2 [savers]=10 [power_cuts]=13 [bad_disks]=5 [tests]=21 [fuzzers]=13
  [planted]=0 [coverage]=0)
with_megatron=build/venv-frameworks/bin/python # sees the package of build/venv
[ -x "$with_megatron" ] || with_megatron=
: "${parts:=rounds,${with_megatron:+megatron,}program,steps,pairs,savers,power_cuts,bad_disks,planted,tests,fuzzers$([ "$seconds" -lt 14400 ] || echo ,coverage)}"
long_tests=(ring_faults dead_writes lifetime_stress worker_fault recovery_crash single_file_crash orphan_worker trainer_killed)
all=0
for name in ${parts//,/ }; do
  [ -n "${shares[$name]:-}" ] || fail "--parts: there is no $name; see tools/campaign.sh --help"
  all=$((all + shares[$name]))
done
wanted() { [[ ,$parts, == *,$1,* ]]; }
[ "$(id -u)" != 0 ] || ! wanted bad_disks || install_missing dmsetup
# share PART [OF]: the seconds of a part, or its OF-th share.
share() { echo $((seconds * shares[$1] / (all > 0 ? all : 1) / ${2:-1})); }

report=$out/report.md
lanes=1
: >"$out/parts.tsv" >"$out/rows.md"
# A former campaign may have used the directory.
for name in "${!shares[@]}" "${long_tests[@]}"; do rm -f "$out/$name.log" "$out/$name.json"; done
rm -f "$out"/*_fuzz.log
export PYTHONUNBUFFERED=1 # a log has all lines until its program was killed
# row NAME SECONDS STATE VERDICT [COMMAND]: the states are those of tools/campaign/verdict.py.
row() {
  printf '%s\t%s\t%s\t%s\n' "$1" "$(($2 / lanes))" "$3" "$4" >>"$out/parts.tsv"
  echo "| $1 | $2 s | $4 | ${5:+\`$5\`} |" >>"$out/rows.md"
}
# part NAME SECONDS COMMAND...: runs a part, which ends by itself or at its time, and keeps its log.
part() {
  local name=$1 longest=$2 result=0 started=$SECONDS told
  shift 2
  say "== $name"
  timeout --kill-after=60 "$longest" "$@" >"$out/$name.log" 2>&1 || result=$?
  tail -n 3 "$out/$name.log"
  told=$(python3 -B tools/campaign/verdict.py part "$out" "$name" "$result" "$((SECONDS - started))" "$longest") ||
    told=$'not run\t'"exit status $result, and the log and report could not be judged"
  row "$name" "$((SECONDS - started))" "${told%%$'\t'*}" "${told#*$'\t'}" "$*"
}
left_out() { row "$1" 0 "left out" "left out: $2"; }
# not_run PART REASON: takes a part out of those that are wanted.
not_run() {
  ! wanted "$1" || row "$1" 0 "not run" "could not run: $2"
  parts=$(tr , '\n' <<<"$parts" | grep -vx "$1" | paste -sd ,) || parts=
}

say "== build"
tools/venv.sh
: >"$out/build.log"
# build PRESET: whether its targets are there.
build() { { cmake --preset "$1" && cmake --build --preset "$1" -j "$(build_jobs)"; } >>"$out/build.log" 2>&1; }
if { wanted tests || wanted planted; } && ! build release; then
  not_run tests "the preset release could not be built (see build.log)"
  not_run planted "the preset release could not be built (see build.log)"
fi
if wanted fuzzers && ! build fuzz; then
  not_run fuzzers "the preset fuzz could not be built (see build.log)"
fi

if wanted megatron && [ -z "$with_megatron" ]; then
  not_run megatron "build/venv-frameworks is missing: tools/venv.sh --frameworks makes it"
fi

bin=build/venv/bin
fuzzer_with_megatron=("$bin/integrity-fuzz")
[ -z "$with_megatron" ] || fuzzer_with_megatron=("$with_megatron" -B -m holdfast.integrity)
cpus=$(nproc)
at_once=$((cpus < 8 ? 4 * cpus : cpus + 24)) # rounds wait for most of their time
# fuzz PART OPTION...: integrity-fuzz for the part's time.
fuzz() {
  local name=$1 program=("$bin/integrity-fuzz")
  [ "$name" != megatron ] || program=("${fuzzer_with_megatron[@]}")
  shift
  ! wanted "$name" || part "$name" "$(($(share "$name") + 900))" "${program[@]}" --jobs "$at_once" --time "$(share "$name")s" \
    --seed "$seed" --dir "$out" --report "$out/$name.json" "$@"
}
drawn=(${events:+--events "$events"} ${engines:+--engines "$engines"})
fuzz rounds "${drawn[@]}"
fuzz megatron "${drawn[@]}" --doors megatron
# Its processes are small, and wait for most of their time.
fuzz program "${drawn[@]}" --jobs $((at_once + 16)) --doors plan --ranks 1 --bytes 32 --tensors 1000
fuzz steps --faults --kills
fuzz pairs --faults --kills --pairs --per-script 20
absent_savers=
if wanted savers; then
  savers=$("${with_megatron:-$bin/python}" -B tools/campaign/savers.py 2>"$out/absent_savers.log") || savers=holdfast.dcp,dcp-thread,dcp-process
  absent_savers=$(<"$out/absent_savers.log")
  IFS=, read -ra each <<<"$savers"
  part savers "$(($(share savers) + 900))" "${fuzzer_with_megatron[@]}" --savers "$savers" \
    --time "$(share savers ${#each[@]})s" --seed "$seed" --dir "$out"
fi
for name in power_cuts bad_disks; do
  if [ "$(id -u)" != 0 ]; then
    ! wanted "$name" || left_out "$name" "mounting its disks needs root"
  elif [ "$name" = power_cuts ]; then
    fuzz power_cuts --power-cuts ext4,ext4-nojournal,xfs,btrfs
  else
    fuzz bad_disks --bad-disks ext4,xfs,btrfs
  fi
done
# tests PART SECONDS OPTION...: ctest for a time. No test of it is ended before, as by the time-out of the preset, which would count as a
# failure. The log of --verbose has each single test when it ends.
tests() {
  local name=$1 longest=$2
  shift 2
  part "$name" "$longest" ctest --preset release --verbose --timeout "$((longest + 600))" "$@"
}
if wanted planted; then
  tests planted 1800 -L planted
fi
if wanted tests; then
  for name in "${long_tests[@]}"; do
    HOLDFAST_LONG=1 tests "$name" "$(share tests ${#long_tests[@]})" -R "/$name"
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
headline=$(python3 -B tools/campaign/verdict.py whole "$out") || status=$?
[ -n "$headline" ] || fail "$out/parts.tsv: its parts could not be judged"
version=$(git describe --always 2>/dev/null || echo unknown)
# Its own pages change with --write.
git diff --quiet HEAD -- . ':!docs' 2>/dev/null || version+=-dirty
{
  echo "# Holdfast on this machine"
  echo
  echo "$(date -u +%F), $(uname -srm), $(nproc) CPUs, seed $seed; $(df --output=fstype "$out" | tail -n 1) at $out;"
  echo "version $version."
  echo
  echo "$headline"
  echo
  echo "| part | time | result | command |"
  echo "| --- | --- | --- | --- |"
  cat "$out/rows.md"
  echo
  echo "## Rounds"
  echo
  echo '```'
  for name in rounds megatron program; do
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
  echo "## Bad disks"
  echo
  echo '```'
  cat "$out/bad_disks.log" 2>/dev/null || true
  echo '```'
  echo
  echo "## The same rounds with other savers"
  echo
  grep -s '^|' "$out/savers.log" || true
  [ -z "$absent_savers" ] || printf '\nNot here:\n\n%s\n' "$absent_savers"
  echo
  echo "## Line coverage of runtime/ and io_uring/"
  echo
  grep -s '^|' "$out/coverage.log" || echo "not measured"
  echo
  echo "## Fuzzers"
  echo
  for log in "$out"/*_fuzz.log; do
    [ -f "$log" ] || continue
    echo "- $(basename "$log" .log): $(sed -n 's/^stat::number_of_executed_units: */executions: /p' "$log")," \
      "edges reached: $(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | sort -n | tail -n 1)"
  done
} >"$report"
say "== $report"
sed -n '1,20p' "$report"
if [ -n "$write" ] && ! "$bin/python" -B tools/campaign/sums.py "$out" "$version" "$seed"; then
  echo "docs/campaigns.json and docs/integrity.md were not written" >&2
  [ "$status" = 1 ] || status=2
fi
judged=1
exit "$status"
