"""`install` and its way back, whatever was imported before; scripts that are run as they are."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import pytest

import holdfast.dcp  # noqa: F401  # what every process here would import for itself

pytestmark = pytest.mark.long

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"


def _run(code: str, arguments: list[str], path: str, out: str) -> None:
    with open(out, "w") as file, contextlib.redirect_stdout(file):
        sys.path.insert(0, path)
        sys.argv = arguments
        try:
            exec(compile(textwrap.dedent(code), "<code>", "exec"), {"__name__": "__main__"})
        except BaseException:
            print(traceback.format_exc())
            raise


def _python(code: str, tmp_path: Path, *arguments: str, path: str = "") -> str:
    """What code prints in a process that has not imported Megatron."""
    # A look for its package imports the namespace above it.
    assert "megatron.core" not in sys.modules, "a test has imported it in this process"
    out = tmp_path / "out"
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(code, ["script", *arguments], path, str(out))
    )
    process.start()
    process.join(300)
    assert process.exitcode == 0, out.read_text()
    return out.read_text()


_CHECK = f"""
import importlib
def of(module, name):
    return getattr(importlib.import_module(module), name).__module__.split(".")[0]
def check(ours):
    want = "holdfast" if ours else None
    for module in ("{_STRATEGIES}.torch", "megatron.training.async_utils", "megatron.training.checkpointing"):
        assert (of(module, "get_async_strategy") == "holdfast") == ours, module
    assert (of("{_STRATEGIES}.async_utils", "AsyncCallsQueue") == "holdfast") == ours
    assert (of("mine", "AsyncCallsQueue") == "holdfast") == ours
"""


@pytest.mark.parametrize("order", ["installed first", "imported first"])
def test_names_are_replaced_and_put_back(order: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"from {_STRATEGIES}.async_utils import AsyncCallsQueue\n")
    first = "holdfast.megatron.install()" if order == "installed first" else "check(False)"
    _python(f"import holdfast.megatron\n{_CHECK}\n{first}\nholdfast.megatron.install()\ncheck(True)\n"
            "holdfast.megatron.uninstall()\ncheck(False)\nholdfast.megatron.install()\ncheck(True)\n",
            tmp_path, path=str(tmp_path))  # fmt: skip


def test_neither_dialect_needs_nvidia_resiliency_ext(tmp_path: Path) -> None:
    out = _python(
        f"""
        import sys
        for name in ["nvidia_resiliency_ext", *sys.modules]:
            if name.startswith("nvidia_resiliency_ext"):
                sys.modules[name] = None
        import holdfast.megatron
        holdfast.megatron.install()
        from {_STRATEGIES}.torch import get_async_strategy
        for dialect in ("mcore", "nvrx"):
            name, names = get_async_strategy(dialect)
            print(name, *sorted(n for n, v in names.items() if v is not None))
            print(get_async_strategy(dialect, "AsyncRequest")[1]._fields)
        try:
            get_async_strategy("else")
        except TypeError as error:
            print(error)
        """,
        tmp_path,
    )
    mcore, fields, nvrx, nvrx_fields, refusal = out.splitlines()
    assert mcore.split() == ["mcore", "AsyncCallsQueue", "AsyncRequest", "CachedMetadataFileSystemReader", "FileSystemWriterAsync",
                             "get_write_results_queue", "save_state_dict_async_finalize", "save_state_dict_async_plan"]  # fmt: skip
    assert set(nvrx.split()) - set(mcore.split()) == {"nvrx", "CheckpointMetadataCache"}
    assert fields == nvrx_fields
    assert "nvrx and mcore" in refusal


def test_what_megatron_asks_the_signatures_for(tmp_path: Path) -> None:
    """`megatron.training.async_utils` passes only what it finds by `inspect`."""
    out = _python(
        """
        import argparse
        import holdfast, holdfast.megatron
        holdfast.megatron.install()
        from megatron.training import async_utils, global_vars
        for dialect in ("mcore", "nvrx"):
            global_vars._GLOBAL_ARGS = argparse.Namespace(
                async_strategy=dialect, async_ckpt_use_cpu_shm=True, async_ckpt_cpu_priority=7,
                async_ckpt_io_priority=3, async_save=True, use_persistent_ckpt_worker=True)
            async_utils.init_persistent_async_worker(1)
            print(type(async_utils._async_calls_queue).__module__, async_utils.is_empty_async_queue())
            async_utils.reset_persistent_async_worker(dialect)
        from holdfast import _runtime
        print({k: _runtime.default.options[k] for k in ("launcher", "nice", "io_priority_class")})
        """,
        tmp_path,
    )
    assert out.splitlines()[:2] == ["holdfast.megatron.queue True"] * 2
    assert out.splitlines()[2] == "{'launcher': 'persistent', 'nice': 7, 'io_priority_class': 3}"


def test_an_old_finder_of_modules_is_passed_over(tmp_path: Path) -> None:
    out = _python(
        f"""
        import sys
        class Old:  # of the time before find_spec
            find_module = staticmethod(lambda name, path=None: None)
        sys.meta_path.insert(0, Old())
        import holdfast.megatron
        holdfast.megatron.install()
        from {_STRATEGIES}.torch import get_async_strategy
        print(get_async_strategy.__module__)
        """,
        tmp_path,
    )
    assert out.split() == ["holdfast.megatron.dialects"]


_SCRIPT = """
import sys
import helper
from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy
assert __name__ == "__main__"
print(get_async_strategy.__module__, sys.argv[1:], helper.__name__)
"""
_SAID = "holdfast.megatron.dialects ['--lr', '1'] helper"


def test_torchrun_runs_a_script_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "pretrain.py").write_text(_SCRIPT)
    (tmp_path / "helper.py").write_text("")
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "holdfast.megatron", "pretrain.py",
               "--lr", "1"]  # fmt: skip
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", *command], capture_output=True, text=True,
                          timeout=300, cwd=tmp_path, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert _SAID in done.stdout


def test_a_script_is_run_with_a_safe_path(tmp_path: Path) -> None:
    """With -P the script's directory is not searched, and the first entry is one of the user's."""
    (tmp_path / "of scripts").mkdir()
    (tmp_path / "of scripts" / "pretrain.py").write_text(_SCRIPT)
    (tmp_path / "of modules").mkdir()
    (tmp_path / "of modules" / "helper.py").write_text("")
    command = [sys.executable, "-P", "-W", "ignore", "-m", "holdfast.megatron", "of scripts/pretrain.py", "--lr", "1"]
    path = os.pathsep.join(filter(None, [str(tmp_path / "of modules"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False,
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert _SAID in done.stdout


def test_a_module_is_run_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "pretrain.py").write_text(_SCRIPT)
    (tmp_path / "helper.py").write_text("")
    code = "from holdfast.megatron import __main__\n__main__.main()"
    assert _python(code, tmp_path, "-m", "pretrain", "--lr", "1", path=str(tmp_path)).strip() == _SAID


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None, reason="nvidia-resiliency-ext is not there"
)
def test_requests_are_of_the_frameworks_own_classes(tmp_path: Path) -> None:
    out = _python(
        """
        import holdfast.megatron
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core
        holdfast.megatron.install()
        from holdfast.megatron.dialects import get_async_strategy
        print(get_async_strategy("nvrx", "AsyncRequest")[1] is core.AsyncRequest)
        queue = core.AsyncCallsQueue()
        core.abort_nvrx_checkpoint()
        print(type(queue).__module__, queue in core.AsyncCallsQueue.get_instances())
        """,
        tmp_path,
    )
    assert out.split() == ["True", "holdfast.megatron.queue", "True"]
