#!/usr/bin/env bash
# Makes build/venv, the Python environment of the tests and examples: PyTorch, the reference safetensors library, test
# tools, and this checkout's holdfast package, built and installed as `pip install .` does.
#
#   tools/venv.sh [PIP INSTALL OPTION...]
#   tools/venv.sh --frameworks   build/venv-frameworks on top of it: Megatron-Core, nvidia-resiliency-ext, Lightning and
#                                torchtitan, in the versions below, for tests/frameworks. It sees the packages of build/venv
#                                as they are.
#
# HOLDFAST_TORCH   which PyTorch, as pip takes it (default torch==2.13.0). The CPU build is enough; a range that an installed
#                  one meets installs nothing more.
# HOLDFAST_VENV    where (default build/venv).
# HOLDFAST_PYTHON  the interpreter (default Debian's python3).
# HOLDFAST_WHEELS  a folder of wheels by tools/build-wheels.sh: the package is installed from there, and nothing is built.
# HOLDFAST_MEGATRON, HOLDFAST_MEGATRON_OLDEST, HOLDFAST_NVRX, HOLDFAST_LIGHTNING, HOLDFAST_TORCHTITAN   versions for
#                  --frameworks.
# Run it again after a change: what is up to date stays.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
wheels=${HOLDFAST_WHEELS:+$(realpath -m -- "$HOLDFAST_WHEELS")}
cd "$root"

case "${1:-}" in
  -h | --help) print_help ;;
esac
if [ "${1:-}" = --frameworks ]; then
  [ $# = 1 ] || fail "--frameworks takes no further option"
  [ -x "${HOLDFAST_VENV:-$root/build/venv}/bin/python" ] || "$root/tools/venv.sh" || exit 1
  exec "$root/tools/frameworks.sh" "${HOLDFAST_VENV:-$root/build/venv}"
fi
[ -n "$wheels" ] || install_missing "${packages_build[@]}" "${packages_python[@]}"
venv=${HOLDFAST_VENV:-$root/build/venv}
python=$venv/bin/python
# Debian's own: another python3 that comes first in PATH may lack the headers.
system_python=${HOLDFAST_PYTHON:-/usr/bin/python3}
[ -n "${HOLDFAST_PYTHON:-}" ] || [ -x "$system_python" ] || system_python=python3

if ! { [ -x "$python" ] && "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; } 2>/dev/null; then
  say "Making $venv"
  "$system_python" -m venv --clear "$venv"
fi
pip() { "$python" -m pip --disable-pip-version-check install -q --no-compile "$@" </dev/null; }
say "Installing PyTorch, the test tools and holdfast into $venv"
pip "${HOLDFAST_TORCH:-torch==2.13.0}" 'numpy<3' || fail "pip could not install PyTorch: is there a network?"
pip 'safetensors>=0.5,<1' 'pytest>=8,<10' 'pytest-xdist>=3.7,<4' 'pytest-timeout>=2,<3' 'hypothesis>=6,<7' 'expecttest<1' 'grpcio<2' 'prometheus-client<1' \
  'ruff<1' 'mypy<3' 'matplotlib<4' 'rich>=13,<16' 'obstore>=0.8,<1' 'moto[s3]>=5,<6' 'flask<4' 'flask-cors<7' \
  'wsgidav>=4.3,<5' 'cheroot>=10,<12' 'scikit-build-core>=0.10,<1' 'nanobind>=2.4,<3'
if [ -n "$wheels" ]; then
  pip --no-index --no-deps --only-binary holdfast --force-reinstall --find-links "$wheels" "$@" holdfast ||
    fail "$wheels has no wheel of holdfast for $("$python" --version); tools/build-wheels.sh makes one"
else
  # The build's own tools are in the environment, so that its folder in build/ can be used again: fast the second time.
  log=$root/build/pip-install.log
  # The release build's compiler, under the same name, and its flags, so that the compiler's cache serves both.
  export CC=${CC:-cc} CXX=${CXX:-c++}
  pip --compile --no-build-isolation --no-deps --force-reinstall -v --config-settings=cmake.define.HOLDFAST_WERROR=ON "$@" . \
    >"$log" 2>&1 || {
    tail -n 60 "$log"
    fail "pip install . failed; all of its output is in $log"
  }
fi
# Of ten thousand modules a fifth is used. Python keeps what it compiles of these here: many processes of the tests keep nothing.
env -u PYTHONDONTWRITEBYTECODE "$python" -W ignore -c '
import contextlib, importlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)' torch._dynamo torch.distributed.checkpoint.{format_utils,state_dict} torch.distributed.fsdp \
  _pytest.{faulthandler,junitxml,pastebin,setuponly,setupplan,skipping,unittest,unraisableexception,warnings} cheroot.wsgi execnet.multi \
  expecttest grpc hypothesis moto.server numpy.ctypeslib numpy.ma obstore prometheus_client pytest_timeout rich.progress safetensors.torch \
  wsgidav.wsgidav_app xdist.{looponfail,plugin}
"$python" -c 'import holdfast, torch; print("holdfast", holdfast.__version__, "with PyTorch", torch.__version__)'
