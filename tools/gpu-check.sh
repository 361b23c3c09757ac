#!/usr/bin/env bash
# Checks on a machine with one GPU what needs one: copies behind the training, the bytes of checkpoints, GPU memory, forks.
#
#   tools/gpu-check.sh [--out DIR] [--python PROGRAM] [--scratch DIR] [--only STEP,...] [--rehearse]
#   tools/gpu-check.sh --pack FILE.tar.xz [--for PYTHON] [--peer-tests DIR]
#
# --out       DIR gets results.jsonl, a row as soon as it is known, and at the end results.json and table.md
#             (default ./gpu-check).
# --python    a Python with PyTorch (default python3). Without PyTorch, the steps run that need none.
# --scratch   a directory on the disk to save to (default $TMPDIR or /tmp).
# --only      only these steps: cuda_tests, late_copies, dirty_data, persistent_callers, forks, lightning_memory, load_memory,
#             sharded. They are in this order, the most valuable first, and take 9 minutes at most.
# --rehearse  on the CPU, as on a machine without a GPU: logic and bytes, no figures, and no hurry.
# --pack      makes an archive for a machine without a network, of at most 60 MiB: the sources, the package and the C++ tests
#             built here, their libraries, and wheels of the frameworks. On the other machine: unpack it, and run
#             holdfast/tools/gpu-check.sh. It needs the processor of this machine, a glibc as new, and a driver of CUDA 11.4 or
#             newer.
# --for       the Python to build for (default python3.12; a package built with 3.12 serves newer ones, too).
# --peer-tests  a directory of nvidia-resiliency-ext's own tests to take along.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
packed=$root/packed
time_max=540
archive_max=$((60 << 20))
# Names and seconds.
steps=(cuda_tests:75 late_copies:90 dirty_data:120 persistent_callers:100 forks:120 lightning_memory:80 load_memory:45 sharded:150)

fail() {
  printf '%s\n' "$*" >&2
  exit 2
}
out=gpu-check python=python3 scratch=${TMPDIR:-/tmp} only='' rehearse='' archive='' target=python3.12 peers=''
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help)
      sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --rehearse) rehearse=1 && shift && continue ;;
  esac
  [ $# -ge 2 ] || fail "$1: see tools/gpu-check.sh --help"
  case "$1" in
    --out) out=$2 ;;
    --python) python=$2 ;;
    --scratch) scratch=$2 ;;
    --only) only=,$2, ;;
    --pack) archive=$2 ;;
    --for) target=$2 ;;
    --peer-tests) peers=$2 ;;
    *) fail "$1: see tools/gpu-check.sh --help" ;;
  esac
  shift 2
done

# pack: writes the archive.
pack() {
  local tests=release programs=(cuda_gpu_test cuda_save_test cuda_lost_context_test) wheels version
  stage=$(mktemp -d) # not local: it is removed at the exit
  trap 'rm -rf "$stage"' EXIT
  mkdir -p "$stage/holdfast/packed/bin" "$stage/holdfast/packed/lib"
  wheels=$stage/holdfast/packed/wheels
  (cd "$root" && git ls-files -z | tar --null --files-from=- -cf -) | tar -C "$stage/holdfast" -xf -
  echo "Building the package for $target"
  "$target" -m pip --disable-pip-version-check wheel -q --no-deps -w "$wheels" "$root" </dev/null
  version=$("$target" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  echo "Fetching the frameworks"
  # Of what is there already, nothing is unpacked on the other machine.
  local platforms=() minor
  for minor in 39 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${minor}_$(uname -m)"); done
  for wheel in megatron-core==0.19.2 nvidia-resiliency-ext==0.7.0 lightning==2.6.5 lightning-utilities torchmetrics psutil \
    numpy packaging tqdm pyyaml fsspec typing-extensions einops hjson msgpack ninja py-cpuinfo; do
    "$target" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: --python-version "$version" \
      --implementation cp "${platforms[@]}" --platform any -d "$wheels" "$wheel" </dev/null || echo "left out: $wheel"
  done
  # With what they need, in the versions that they need: pytest, and pydantic for DeepSpeed.
  "$target" -m pip --disable-pip-version-check download -q --only-binary=:all: --python-version "$version" \
    --implementation cp "${platforms[@]}" --platform any -d "$wheels" pytest pydantic </dev/null || echo "left out: pytest, pydantic"
  # It is published as sources. Its operations are compiled when they are first used, and none is here.
  DS_BUILD_OPS=0 "$target" -m pip --disable-pip-version-check wheel -q --no-deps -w "$wheels" deepspeed==0.19.8 </dev/null ||
    echo "left out: deepspeed"
  echo "Building the C++ tests"
  (cd "$root" && cmake --preset "$tests" && cmake --build --preset "$tests" -j "$(nproc)" --target holdfast-worker "${programs[@]}") \
    >"$stage/build.log" 2>&1 || {
    tail -n 20 "$stage/build.log"
    echo "left out: the C++ tests, which could not be built"
  }
  for program in tools/holdfast-worker "${programs[@]/#/tests/cuda/}"; do
    [ ! -x "$root/build/$tests/$program" ] || cp "$root/build/$tests/$program" "$stage/holdfast/packed/bin"
  done
  # What such a machine lacks: all but the C and C++ libraries of a system.
  "$target" -m zipfile -e "$wheels"/holdfast-*.whl "$stage/package"
  find "$stage/holdfast/packed/bin" "$stage/package/holdfast/bin" "$stage/package/holdfast/"*.so -type f -exec ldd {} + 2>/dev/null | awk '/=> \// {print $3}' | sort -u |
    grep -Ev '/lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|z)\.so' | xargs -r cp -L -t "$stage/holdfast/packed/lib"
  strip "$stage"/holdfast/packed/bin/* 2>/dev/null || true
  if [ -n "$peers" ]; then
    mkdir -p "$stage/holdfast/peers"
    cp -r "$peers" "$stage/holdfast/peers/nvidia-resiliency-ext"
  fi
  tar -C "$stage" -cJf "$archive" holdfast
  local bytes
  bytes=$(stat -c %s "$archive")
  [ "$bytes" -le "$archive_max" ] || fail "$archive has $bytes bytes, more than $archive_max"
  echo "$archive: $((bytes >> 20)) MiB"
}
if [ -n "$archive" ]; then
  pack
  exit 0
fi

command -v "$python" >/dev/null || fail "$python: no such program; --python names a Python"
mkdir -p "$out"
out=$(cd "$out" && pwd)
rows=$out/results.jsonl
: >"$rows"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
started=$SECONDS
hurry=1
if [ -n "$rehearse" ]; then
  hurry=4 time_max=$((4 * time_max))
fi
export PYTHONDONTWRITEBYTECODE=1

# row STEP RESULT: what the script itself has to say.
row() { "$python" "$here/gpu_check/table.py" "$rows" --add "$1" "$2"; }

# What is missing, from the archive. Of a wheel the first folder of its record is what is imported.
for wheel in "$packed"/wheels/*.whl; do
  [ -e "$wheel" ] || continue
  "$python" - "$wheel" "$site" <<'PYTHON' || row packages "FAILED: $(basename "$wheel") could not be unpacked"
import importlib.util, pathlib, sys, zipfile

wheel, site = sys.argv[1:]
sys.path.remove("")  # the unpacked archive has a folder of the package's name
# Packages of several distributions, and those whose import has another name.
names = {"megatron_core": "megatron.core", "pyyaml": "yaml", "nvidia_resiliency_ext": "nvidia_resiliency_ext.checkpointing",
         "py_cpuinfo": "cpuinfo"}
name = pathlib.Path(wheel).name.split("-")[0].lower()
try:
    is_there = importlib.util.find_spec(names.get(name, name)) is not None
except ModuleNotFoundError:
    is_there = False
if not is_there:
    zipfile.ZipFile(wheel).extractall(site)
    for program in pathlib.Path(site).glob("holdfast/bin/*"):
        program.chmod(0o755)
PYTHON
done
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
[ ! -d "$packed/lib" ] || export LD_LIBRARY_PATH=$packed/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# The C++ tests: of the archive, of a build that is there, or built now, where there is a GPU and CMake.
programs=$packed/bin
if [ ! -d "$programs" ]; then
  programs=$site/programs
  mkdir -p "$programs"
  build=$root/build/release
  if [ ! -x "$build/tests/cuda/cuda_gpu_test" ] && [ -z "$rehearse" ] && [ -e /dev/nvidiactl ] && command -v cmake >/dev/null; then
    (cd "$root" && cmake --preset release && timeout 150 cmake --build --preset release -j "$(nproc)" \
      --target holdfast-worker cuda_gpu_test cuda_save_test cuda_lost_context_test) >"$out/build.log" 2>&1 ||
      row cuda_tests "FAILED: they could not be built; see build.log"
  fi
  for program in tools/holdfast-worker tests/cuda/cuda_{gpu,save,lost_context}_test; do
    [ ! -x "$build/$program" ] || ln -s "$build/$program" "$programs"
  done
fi

# All steps need it but two, which skip what they cannot do.
missing=$("$python" -c 'import importlib.util, sys
sys.path = [path for path in sys.path if path]
print(next((name for name in ("torch", "holdfast") if importlib.util.find_spec(name) is None), ""))')
needs_none=,cuda_tests,forks,

for step in "${steps[@]}"; do
  name=${step%:*} limit=$((${step#*:} * hurry))
  [ -z "$only" ] || [[ $only = *,$name,* ]] || continue
  left=$((time_max - 5 - (SECONDS - started)))
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -lt 5 ]; then
    row "$name" "skipped: the $time_max s are over"
    continue
  fi
  if [ -n "$missing" ] && [[ $needs_none != *,$name,* ]]; then
    row "$name" "skipped: no $missing"
    continue
  fi
  printf '\n== %s (at most %s s)\n' "$name" "$limit"
  arguments=(--out "$rows")
  if [ "$name" = cuda_tests ]; then
    arguments+=(--build "$programs")
  else
    arguments+=(--scratch "$scratch" ${rehearse:+--device cpu})
  fi
  status=0
  timeout -k 5 "$limit" "$python" "$here/gpu_check/$name.py" "${arguments[@]}" >>"$out/log.txt" 2>&1 || status=$?
  case $status in
    0) ;;
    124 | 137) row "$name" "FAILED: no end after $limit s" ;;
    *) row "$name" "FAILED: exit status $status; see log.txt" ;;
  esac
done
echo
"$python" "$here/gpu_check/table.py" "$rows" --table "$out"
