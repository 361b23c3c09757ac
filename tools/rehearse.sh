#!/usr/bin/env bash
# Rehearses the first minutes of a user in the containers of others: pip install of a wheel, a first save, its verification and its
# load, in root file systems made of packages, each with less than the one before.
#
#   tools/rehearse.sh [--systems NAME,...] [--situations NAME,...] [--wheels DIR] [--write]
#
# --systems     bullseye, bookworm, trixie, forky (Debian 11 to 14), jammy (Ubuntu 22.04); default: bookworm,trixie.
# --situations  user, no_sys_admin, no_io_uring, small_shm, read_only, one_gib (below; default: all).
# --wheels      where the wheels are (default build/wheels/out, which tools/build-wheels.sh makes).
# --write       writes the rows into the table of docs/install.md, if no rehearsal fails.
#
#   user          an unprivileged user, and nothing else: pip install, then the first save.
#   no_sys_admin  root without CAP_SYS_ADMIN, as in a container engine's default.
#   no_io_uring   io_uring is refused by a seccomp filter, as in a container engine's default.
#   small_shm     /dev/shm has 64 MiB, as in a container engine's default.
#   read_only     the root file system is read-only; the checkpoint's directory is a volume.
#   one_gib       a memory control group of 1 GiB, 8 ranks.
#
# Needs root (file systems, control groups), mmdebstrap and bubblewrap, and for PyTorch the index of pip. PyTorch stands beside the root
# file systems in build/rehearse/torch-VERSION and is mounted into them: HOLDFAST_REHEARSE_TORCH_3_12=DIR names another folder of packages
# for Python 3.12, and so on. Where the system's Python is too old, that of Debian 12 is built in the root file system.
#
# Ubuntu's packages come from HOLDFAST_UBUNTU_MIRROR=URL, signed by HOLDFAST_UBUNTU_KEYRING=FILE (default: where Ubuntu's package
# ubuntu-keyring puts it; Debian 12 has no such package). Exit status 1 if a rehearsal fails.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# shellcheck source=tools/rehearse/roots.sh
source "$root/tools/rehearse/roots.sh"

systems=bookworm,trixie situations=user,no_sys_admin,no_io_uring,small_shm,read_only,one_gib
wheels=$root/build/wheels/out write=
read_options 'systems= situations= wheels= write' "$@"
wheels=$(realpath -m -- "$wheels")
IFS=, read -ra systems <<<"$systems"
IFS=, read -ra situations <<<"$situations"
[ "$(id -u)" = 0 ] || fail "tools/rehearse.sh needs root: it makes root file systems and control groups"
ls "$wheels"/holdfast-*.whl >/dev/null 2>&1 || fail "$wheels: no wheels of holdfast; tools/build-wheels.sh makes them"
install_missing mmdebstrap bubblewrap dpkg-dev

work=$root/build/rehearse
user=1000
gib=$((1 << 30))
mkdir -p "$work"
results=$work/results.jsonl
: >"$results"

# enter SYSTEM SITUATION COMMAND...: runs a command in a container.
enter() {
  local name=$1 situation=$2 as=(setpriv --reuid "$user" --regid "$user" --clear-groups) less=() tree=(--bind "$work/$name" /) shm=$((8 * gib))
  local home=$work/homes/$name filter=
  shift 2
  mkdir -p "$home" "$work/volumes/$name/$situation"
  chown -R "$user:$user" "$home" "$work/volumes/$name/$situation"
  local options=(--unshare-user)
  case "$situation" in
    # bwrap itself needs the capability, and its --cap-drop leaves it to root.
    no_sys_admin) as=() options=(--cap-add ALL) less=(setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin) ;;
    no_io_uring) filter=$work/no_io_uring.bpf && python3 "$root/tools/rehearse/no_io_uring.py" >"$filter" && options+=(--seccomp 9) ;;
    small_shm) shm=$((64 << 20)) ;;
    read_only) tree=(--ro-bind "$work/$name" /) ;;
  esac
  # A container engine, too, shows its control groups.
  local command=("${as[@]}" bwrap "${options[@]}" "${tree[@]}" --dev /dev --proc /proc --ro-bind /sys /sys --unshare-pid --unshare-ipc --die-with-parent
    --size "$shm" --tmpfs /dev/shm --ro-bind "$wheels" /wheels --ro-bind "$packages" /torch --ro-bind "$root/tools/rehearse" /rehearse
    --bind "$home" /home/user --bind "$work/volumes/$name/$situation" /run/volume --chdir /home/user
    --clearenv --setenv PATH /home/user/venv/bin:/usr/local/bin:/usr/bin:/bin --setenv HOME /home/user --setenv PYTHONDONTWRITEBYTECODE 1 "${less[@]}" "$@")
  if [ "$situation" = one_gib ]; then
    in_group "${command[@]}"
  elif [ -n "$filter" ]; then
    "${command[@]}" 9<"$filter"
  else
    "${command[@]}"
  fi
}

# in_group COMMAND...: in a memory control group of 1 GiB.
in_group() {
  local version1=/sys/fs/cgroup/memory group limit result=0
  if [ -d "$version1" ]; then group=$version1/holdfast-rehearse-$$ limit=memory.limit_in_bytes; else group=/sys/fs/cgroup/holdfast-rehearse-$$ limit=memory.max; fi
  mkdir "$group" && echo "$gib" >"$group/$limit" || fail "$group: no memory control group can be made here"
  (echo "$BASHPID" >"$group/cgroup.procs" && exec "$@") || result=$?
  # The kernel may still be ending the processes of a container.
  local tries
  for tries in {1..50}; do
    rmdir "$group" 2>/dev/null && break
    sleep 0.1
  done
  return "$result"
}

status=0
for name in "${systems[@]}"; do
  file_system "$name"
  version=$(chroot "$work/$name" env PATH=/usr/local/bin:/usr/bin:/bin python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  packages=$(torch "$version")
  rm -rf "$work/homes/$name" "$work/volumes/$name"
  # The user's own environment; PyTorch is put into it as a path.
  enter "$name" user sh -c 'python3 -m venv venv && echo /torch >"$(venv/bin/python -c "import sysconfig; print(sysconfig.get_path(\"purelib\"))")/torch.pth"'
  for situation in "${situations[@]}"; do
    say "== $name, Python $version: $situation"
    if [ "$situation" = no_sys_admin ] && enter "$name" "$situation" unshare --mount true 2>/dev/null; then
      fail "$name, $situation: a process there can make a mount namespace, for which it needs CAP_SYS_ADMIN"
    fi
    ranks=1 mib=64
    [ "$situation" != one_gib ] || ranks=8 mib=48
    log=$work/$name-$situation.log
    installed=0
    if [ "$situation" = user ]; then
      began=$(date +%s.%N)
      enter "$name" user venv/bin/python -m pip --disable-pip-version-check install -q --no-index --find-links /wheels holdfast >"$log" 2>&1 || {
        cat "$log"
        fail "pip could not install the wheel in $name"
      }
      installed=$(awk -v a="$began" -v b="$(date +%s.%N)" 'BEGIN { print b - a }')
    fi
    answer=
    if answer=$(enter "$name" "$situation" venv/bin/python /rehearse/first_save.py /run/volume "$ranks" "$mib" 2>"$log"); then
      python3 - "$name" "$situation" "$installed" "$answer" "$log" >>"$results" <<'END'
import json, sys
name, situation, installed, answer, log = sys.argv[1:]
told = sorted({line.split("] ", 1)[-1] for line in open(log) if line.startswith("[rank") and "saved" not in line})
print(json.dumps({"system": name, "situation": situation, "install": float(installed), **json.loads(answer), "told": told}))
END
      cat "$log"
      echo "$answer"
    else
      ended=$?
      status=1
      cat "$log"
      # 137: SIGKILL, as the kernel ends a process of a memory control group that is full.
      echo "FAILED: $name, $situation: exit status $ended" >&2
    fi
  done
done
[ "$status" = 0 ] || write=
python3 -B "$root/tools/rehearse/table.py" $write "$results" || status=1
exit "$status"
