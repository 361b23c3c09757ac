"""What the steps of the GPU check share: their arguments, the device, and rows that are on disk at once.

A row is a JSON object on a line of its own: step, what, value, unit, aim, result, device. The result is "ok", "MISSED" (the
aim), "measured" (no aim), or begins with "skipped" or "FAILED". Without a GPU a step rehearses on the CPU: its rows say so, and
show the bytes alone, never a figure that would be read as that of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python/benchmarks"))  # the ways of saving, and their state
# So that torch looks for a GPU without the driver, after which no forked child could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
REHEARSAL = "rehearsal (CPU)"
MIB, GIB = 1 << 20, 1 << 30


class Skip(Exception):
    """Why a step, or a part of it, cannot run here."""


class Report:
    """The rows of one step.

    Attributes:
        device: name of the GPU, or `REHEARSAL`.
        cuda: whether there is a GPU to use.
        scratch: a directory on the disk that is measured, removed at the end.
    """

    def __init__(self, step: str, out: Path, cuda: bool, device: str, scratch: Path) -> None:
        self.step, self.cuda, self.device, self.scratch = step, cuda, device, scratch
        self._out = out

    def size(self, on_gpu: int, on_cpu: int) -> int:
        """A number of bytes: for a GPU, and for a rehearsal."""
        return on_gpu if self.cuda else on_cpu

    def row(self, what: str, value: Any = "", unit: str = "", *, aim: str = "", ok: bool | None = None) -> None:
        """A figure: shown where there is a GPU.

        Args:
            what, value, unit: of the figure.
            aim: in words.
            ok: whether it is met; None: there is none.
        """
        result = "measured" if ok is None else "ok" if ok else "MISSED"
        if not self.cuda:
            value, unit, aim, result = "", "", "", "ran"
        self._write(what, value, unit, aim, result)

    def check(self, what: str, value: Any, ok: bool, *, aim: str = "") -> None:
        """An outcome that means the same without a GPU, such as a count of wrong bytes."""
        self._write(what, value, "", aim, "ok" if ok else "MISSED")

    def note(self, what: str, value: Any) -> None:
        """An outcome without an aim, for example of another library."""
        self._write(what, value, "", "", "measured")

    def skip(self, what: str, why: str) -> None:
        self._write(what, "", "", "", f"skipped: {why}")

    def fail(self, what: str, error: BaseException) -> None:
        traceback.print_exception(error)
        self._write(what, "", "", "", f"FAILED: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def part(self, what: str) -> Iterator[None]:
        """A part of the step: what goes wrong in it ends no other part."""
        try:
            yield
        except (Skip, ModuleNotFoundError) as why:
            self.skip(what, str(why))
        except Exception as error:
            self.fail(what, error)
        finally:
            gc.collect()

    def need_packages(self, *names: str) -> None:
        for name in names:
            if importlib.util.find_spec(name) is None:
                raise Skip(f"no {name}")

    def need_gpu(self) -> None:
        if not self.cuda:
            raise Skip("no GPU")

    def apart(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
        """What ``function(report, *args)`` returns, called in a forked child: this process has no CUDA context.

        Raises:
            Skip, RuntimeError, TimeoutError: of that process; all of its processes are ended.
        """
        scratch = Path(tempfile.mkdtemp(dir=self.scratch))
        answer = scratch / "answer.json"

        def call() -> None:
            try:
                found = {"value": function(self._in(scratch), *args)}
            except (Skip, ModuleNotFoundError) as why:
                found = {"skip": str(why)}
            answer.write_text(json.dumps(found))

        child = Child(call)
        try:
            status = child.wait(timeout)
            if not answer.exists():
                raise RuntimeError(f"its process ended with {status}")
            found = json.loads(answer.read_text())
        finally:
            child.end()
            shutil.rmtree(scratch, ignore_errors=True)
        if "skip" in found:
            raise Skip(found["skip"])
        return found["value"]

    def _in(self, scratch: Path) -> Report:
        return Report(self.step, self._out, self.cuda, self.device, scratch)

    def _write(self, what: str, value: Any, unit: str, aim: str, result: str) -> None:
        if isinstance(value, float):
            value = float(f"{value:.4g}")
        line = {"step": self.step, "what": what, "value": value, "unit": unit, "aim": aim, "result": result,
                "device": self.device}  # fmt: skip
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"{self.step}: {what}: {value} {unit} {result}", flush=True)


class Child:
    """A forked child that leads a group of its own.

    Args:
        body: what it does. It ends without the exit handlers of the interpreter.
    """

    def __init__(self, body: Callable[[], Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            self._status: int | None = None
            return
        status = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def wait(self, timeout: float) -> int:
        """The status with which it ends, negative for a signal.

        Raises:
            TimeoutError.
        """
        deadline = time.monotonic() + timeout
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise TimeoutError(f"no end after {timeout:.0f} s")
            else:
                time.sleep(0.01)
        return self._status

    def end(self) -> None:
        """Ends it, and all in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(10)


def in_child(function: Callable[[], str]) -> str:
    """The text that a function returns, called in a forked child; "" where it fails."""
    reads, writes = os.pipe()
    child = Child(lambda: os.write(writes, function().encode()))
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    child.wait(60)
    return text


def gpu_name() -> str:
    """Of the GPU that torch can use; "" without one."""
    try:
        import torch
    except ModuleNotFoundError:
        return ""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def run(step: str, body: Callable[[Report], None], find_gpu: Callable[[], str] = gpu_name) -> None:
    """Runs a step as a program: ``STEP.py --out FILE [--device cpu] [--scratch DIR]``. It always exits with 0.

    Args:
        step: its name.
        body: writes the rows.
        find_gpu: the name of the GPU that it uses.
    """
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: a rehearsal")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    name = "" if given.device == "cpu" else in_child(find_gpu)
    scratch = Path(tempfile.mkdtemp(prefix=f"{step.replace(' ', '-')}-", dir=given.scratch.resolve()))
    report = Report(step, given.out, bool(name), name or REHEARSAL, scratch)
    try:
        # A time limit of gpu-check.sh ends what this has started, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with report.part("all of it"):
            body(report)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# ---- What several steps measure.


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def memory_on_gpu() -> int:
    """Bytes that torch has allocated there."""
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def one_rank(scratch: Path) -> Any:
    """torch.distributed with a process group of one rank, on a GPU with NCCL where that is there."""
    import torch
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    dist.init_process_group(backend, init_method=f"file://{scratch}/store", rank=0, world_size=1)
    return dist


@contextlib.contextmanager
def device_of(report: Report) -> Iterator[str]:
    """The device of a state. In a rehearsal host memory that the runtime takes for a device's, with late copies."""
    if report.cuda:
        yield "cuda"
        return
    import holdfast
    from holdfast import _devices
    from holdfast.integrity.slow_device import SlowDevice

    with _devices.stand_in("cpu", SlowDevice(1)):
        yield "cpu"
        holdfast.flush()
    holdfast.configure(arena_bytes=0)  # lets go of the device
