#!/usr/bin/env bash
# Attacks saves under the kernel of Debian 12, which has device-mapper, in a system emulator that needs no virtualization.
#
#   tools/emulator-campaign.sh [--parts NAME,...] [--systems NAME,...] [--rounds N] [--cuts N] [--resets N] [--ranks N]
#                              [--seed N] [--time T] [--wheels DIR] [--planted]
#
# --parts         log_writes, bad_disks, resets (below; default: all).
# --systems       ext4, ext4-nojournal, xfs, btrfs (default: ext4,xfs,btrfs).
# --rounds        rounds of log_writes and of bad_disks (default 1).
# --cuts          power cuts of a round and file system beside those at each flush (default 20).
# --resets        resets for each file system (default 2).
# --ranks         most ranks of a round (default 2).
# --seed          of the rounds (default: a fresh one).
# --time          after this time log_writes and bad_disks each begin no other round or file system: 90, 10m, 2h (default 4h).
# --wheels        where the wheel of x86-64 is (default build/wheels/out, which tools/build-wheels.sh makes).
# --planted       fsync does nothing in the trainers and their workers: each part must find that, or the exit status is 1.
#
#   log_writes  integrity-fuzz --power-cuts: rounds on a disk that device-mapper's log-writes records; every flush, and drawn moments,
#               are cut, mounted, recovered and held against the model.
#   bad_disks   integrity-fuzz --bad-disks: a thin disk runs out of room; flakey loses or refuses writes from a moment on, or misreads;
#               delay is late.
#   resets      integrity-fuzz --resets: the emulator is killed at a drawn moment and started again; the disk is opened without the page
#               cache of this machine.
#
# Needs root (a root file system), mmdebstrap and QEMU, 4 GiB of memory and 8 GiB in build/emulator, and for PyTorch the index of pip, of
# which the CPU build is enough. The report is build/emulator/report.md.
#
# Exit status 0 if every part has tried something and nothing escaped, 1 if something escaped. 2: nothing escaped, and a part could not run
# or did not end by itself; or no part began, without root or a wheel.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# shellcheck source=tools/rehearse/roots.sh
source "$root/tools/rehearse/roots.sh"
judged=
trap '[ $? != 1 ] || [ -n "$judged" ] || exit 2' EXIT

parts=log_writes,bad_disks,resets systems=ext4,xfs,btrfs rounds=1 cuts=20 resets=2 ranks=2 seed=$RANDOM time=4h wheels=$root/build/wheels/out planted=
read_options 'parts= systems= rounds= cuts= resets= ranks= seed= time= wheels= planted' "$@"
[ "$(id -u)" = 0 ] || fail "tools/emulator-campaign.sh needs root: it makes a root file system"
wheel=$(realpath -e -- "$wheels"/holdfast-*-cp311-*x86_64.whl 2>/dev/null) || fail "$wheels: no wheel for CPython 3.11 on x86-64; tools/build-wheels.sh makes one"
install_missing mmdebstrap qemu-system-x86 e2fsprogs

work=$root/build/emulator
tree=$work/guest job=$work/job disk=$work/disk results=$work/results
RANDOM=$seed
mkdir -p "$work"

# guest: makes $work/guest.img once, with Debian's kernel, Python and tools, and PyTorch, and always the folder of a job.
guest() {
  if [ ! -f "$work/guest.img" ]; then
    if [ ! -f "$tree.complete" ]; then
      root_file_system "$tree" bookworm linux-image-cloud-amd64,python3,dmsetup,e2fsprogs,xfsprogs,btrfs-progs,iproute2 "deb $(debian_mirror) bookworm main"
      touch "$tree.complete"
    fi
    local packages
    packages=$(torch 3.11)
    rm -rf "$tree/torch" && mkdir -p "$tree/job" && { cp -al "$packages/." "$tree/torch" 2>/dev/null || cp -a "$packages/." "$tree/torch"; }
    # pip has compiled for this machine's Python. A few files of PyTorch are for other versions.
    compgen -G "$tree/torch/torch/__pycache__/__init__.cpython-311.pyc" >/dev/null || chroot "$tree" python3 -m compileall -q /torch >/dev/null || true
    install -m 755 "$root/tools/emulator/init" "$tree/sbin/holdfast-init"
    mke2fs -q -t ext4 -d "$tree" "$work/guest.new" "$(($(du -sm "$tree" | cut -f 1) * 5 / 4 + 256))M" >/dev/null
    mv "$work/guest.new" "$work/guest.img"
  fi
  rm -rf "$job" "$results" && mkdir -p "$job" "$results"
  python3 -m pip --disable-pip-version-check install -q --target "$job" --no-deps --only-binary=:all: --python-version 3.11 "$wheel" safetensors </dev/null ||
    fail "pip could not unpack $wheel"
  cp "$root/tests/python/integrity_planted.py" "$job"
}

# boot NAME COMMAND...: starts the guest with a command. The disk vdc is $disk; what the guest says is in $results/NAME.log, and
# what it answers in $results/NAME.
boot() {
  local name=$1
  shift
  printf '%q ' "$@" >"$job/run"
  rm -f "$work/job.img" && mke2fs -q -t ext4 -d "$job" "$work/job.img" 256M >/dev/null
  touch "$disk" && truncate -s 1G "$disk"
  : >"$results/$name" # which a reset reads while the emulator starts
  qemu-system-x86_64 -accel tcg -cpu max -smp 1 -m 4096 -nodefaults -nographic -no-reboot -serial "file:$results/$name.log" \
    -serial "file:$results/$name" -kernel "$tree"/boot/vmlinuz-* -initrd "$tree"/boot/initrd.img-* \
    -append "root=/dev/vda ro console=ttyS0 quiet loglevel=2 panic=-1 init=/sbin/holdfast-init" \
    -drive "file=$work/guest.img,if=virtio,format=raw,snapshot=on" -drive "file=$work/job.img,if=virtio,format=raw,readonly=on" \
    -drive "file=$disk,if=virtio,format=raw,cache=none" </dev/null >"$results/$name.qemu" 2>&1 &
  emulator=$!
}

fuzz=(python3 -m holdfast.integrity --ranks "$ranks" --seed "$seed")
[ -z "$planted" ] || fuzz+=(--plant integrity_planted:syncs_nothing)

# part NAME OPTION...: runs integrity-fuzz in the guest.
part() {
  local name=$1
  shift
  say "== $name"
  boot "$name" "${fuzz[@]}" --report /tmp/report.json "$@"
  wait "$emulator" || true
  sed 's/\r$//' "$results/$name.log" | grep -aE '^(ESCAPE|reproduce|escapes|states|integrity-fuzz:|Traceback|[A-Za-z.]*Error)' || true
}

# reset FILE_SYSTEM NUMBER: one reset, at a moment after a drawn number of lines, and what is there afterwards.
reset() {
  local name=reset-$1-$2 lines=$((RANDOM % 60 + 3)) tries
  say "== $name"
  rm -f "$disk"
  boot "$name-told" "${fuzz[@]}" --first "$2" --resets "$1" --disk /dev/vdc --witness /dev/ttyS1
  for ((tries = 0; tries < 9000; tries++)); do
    kill -0 "$emulator" 2>/dev/null && [ "$(wc -l <"$results/$name-told")" -lt "$lines" ] || break
    sleep 0.1
  done
  sleep "0.$((RANDOM % 10))"
  kill -KILL "$emulator" && wait "$emulator" 2>/dev/null || true
  cp "$results/$name-told" "$job/told"
  part "$name" --resets "$1" --disk /dev/vdc --witness /job/told --after
}

guest
IFS=, read -ra chosen <<<"$parts"
for name in "${chosen[@]}"; do
  case "$name" in
    log_writes) part log_writes --power-cuts "$systems" --recorder log-writes --cuts "$cuts" --rounds "$rounds" --time "$time" ;;
    bad_disks) part bad_disks --bad-disks "$systems" --rounds "$rounds" --time "$time" ;;
    resets)
      for system in ${systems//,/ }; do
        for ((number = 0; number < resets; number++)); do reset "$system" "$number"; done
      done
      ;;
    *) fail "--parts $name: see tools/emulator-campaign.sh --help" ;;
  esac
done
say "== $work/report.md"
status=0
rm -f "$work/report.md"
python3 -B "$root/tools/emulator/table.py" ${planted:+--planted} "$results" "$work/report.md" || status=$?
[ "$status" != 1 ] || [ ! -f "$work/report.md" ] || judged=1
exit "$status"
