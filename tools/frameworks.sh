#!/usr/bin/env bash
# Makes build/venv-frameworks on top of the environment VENV: see tools/venv.sh --frameworks.
#
#   tools/frameworks.sh VENV
#
# Megatron-Core and nvidia-resiliency-ext are installed without what their metadata ask for, which is a newer Python, a
# newer glibc and CUDA: their checkpointing runs without. Of torchtitan's requirements, only what its checkpoint manager
# imports is installed.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

plain=${1:?usage: tools/frameworks.sh VENV}
megatron=${HOLDFAST_MEGATRON:-0.19.2} oldest=${HOLDFAST_MEGATRON_OLDEST:-0.16.1} nvrx=${HOLDFAST_NVRX:-0.6.0} \
  lightning=${HOLDFAST_LIGHTNING:-2.6.5} torchtitan=${HOLDFAST_TORCHTITAN:-0.3.0}
venv=$root/build/venv-frameworks
python=$venv/bin/python

if ! { [ -x "$python" ] && "$python" -c 'import torch, holdfast'; } 2>/dev/null; then
  say "Making $venv"
  "$plain/bin/python" -m venv --clear "$venv"
  # What is installed there is here, too, and is never installed a second time.
  "$plain/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/plain.pth"
fi
pip() { "$python" -m pip --disable-pip-version-check "$@" </dev/null; }

wanted="megatron-core $megatron, nvidia-resiliency-ext $nvrx, lightning $lightning, pytorch-lightning $lightning, torchtitan $torchtitan"
found=$("$python" -c '
import importlib.metadata as found
def version(name):
    try:
        return found.version(name)
    except found.PackageNotFoundError:
        return "missing"
print(", ".join(f"{name} {version(name)}" for name in ("megatron-core", "nvidia-resiliency-ext", "lightning", "pytorch-lightning", "torchtitan")))')
if [ "$found" != "$wanted" ]; then
  say "Installing $wanted into $venv"
  pip install -q --no-compile "lightning==$lightning" "pytorch-lightning==$lightning" triton psutil packaging || fail "pip could not install Lightning: is there a network?"
  pip install -q --no-compile --no-deps --ignore-requires-python "megatron-core==$megatron" || fail "pip could not install megatron-core $megatron"
  pip install -q --no-compile tyro && pip install -q --no-compile --no-deps spmd_types "torchtitan==$torchtitan" || fail "pip could not install torchtitan $torchtitan"
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  # Its one native file is for profiling; the wheel is unpacked where its glibc is too new for pip.
  pip download -q -d "$wheels" --no-deps --only-binary=:all: --implementation cp --platform manylinux_2_39_x86_64 \
    --python-version "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" "nvidia-resiliency-ext==$nvrx" ||
    fail "pip could not fetch nvidia-resiliency-ext $nvrx"
  "$python" -m zipfile -e "$wheels"/*.whl "$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
fi
# A second Megatron-Core, in front of the first for those who put the folder into PYTHONPATH.
if ! [ -d "$venv/megatron-oldest/megatron_core-$oldest.dist-info" ]; then
  rm -rf "$venv/megatron-oldest"
  pip install -q --no-compile --no-deps --ignore-requires-python --target "$venv/megatron-oldest" "megatron-core==$oldest" || {
    rm -rf "$venv/megatron-oldest"
    echo "pip could not install megatron-core $oldest: its tests are left out" >&2
  }
fi
# What the tests use is compiled here, as by tools/venv.sh.
env -u PYTHONDONTWRITEBYTECODE "$python" -W ignore -c '
import megatron.core.dist_checkpointing.strategies.fully_parallel, megatron.core.models.gpt.gpt_layer_specs, nvidia_resiliency_ext.checkpointing.async_ckpt.core, lightning, pytorch_lightning, torchtitan.components.checkpointer, holdfast' 2>/dev/null ||
  fail "the frameworks were installed into $venv, but cannot be imported"
echo "$wanted; megatron-core $oldest"
