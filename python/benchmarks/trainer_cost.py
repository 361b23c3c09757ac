"""What a save costs the trainer, by way of saving: one run, all ways interleaved.

    python trainer_cost.py --dir DIR [--bytes 1GiB] [--rounds 5] [--saves 1] [--window SECONDS] [--ways "WAY;..."] [--json FILE]
                           [--plot FILE] [--bench PROGRAM] [--device cuda]

A trainer with Adam on CPU tensors, or on those of a GPU, runs the same fixed window of steps again and again: without a save,
and with `--saves` of them, the first in front of its first step, the others evenly behind it. Every way gets a window of each
kind in every round.
Columns, for each save:

blocked   seconds inside the call that saves, and in front of it for the save before, where that is not durable yet
lost      seconds that the window with saves took longer than the one without, divided by the saves (a forked child looks free
          in the call and costs copy-on-write faults afterwards). A last save that outlives the window is waited for and not
          counted: intervals must be longer than the uploads, as the default is on a disk of a GB/s, and the output says where
          one was not. More saves a window give the loss more exactly: the noise of a window is divided, too
durable   seconds from the call until the data survives power loss (every way syncs its files)
cpu       core-seconds of the whole machine above those of the window without a save
memory    bytes of anonymous and shared memory at the peak, above those before the way was set up; with a GPU of all memory but
          the page cache: pinned memory may be neither
GPU       with `--device cuda`: bytes that PyTorch has allocated there at the peak, above those of the training

Every way has saved once before it is measured, so that what it keeps (staging memory, processes) is there; it gives that back
before the next way's turn. Afterwards the bytes on disk are compared with the state at the call; a way that differs is shown in
the table, and left out of ratios and plot; another library's way that fails is left out of all. A second table has the time
lost with Holdfast as a part of that with each way, and the time until durable as a multiple of a raw write's: O_DIRECT, 4 MiB
at a time, four at once, with `--bench PROGRAM` (holdfast-bench, from the C++ build) the better one of that and of the program's
own of as many bytes in the same round.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import raw_disk
import torch
from raw_disk import sync_file

import holdfast

TENSORS = 48
WINDOW = 64 << 20  # of staging memory, through which staged tensors are written
OURS = ("holdfast", "holdfast.dcp")
PORT = 29511
# Of the table: key, title, scale, digits.
COLUMNS = (
    ("blocked", "blocked, s", 1, 2), ("lost", "lost, s", 1, 2), ("durable", "durable, s", 1, 2),
    ("cpu", "CPU, core-s", 1, 1), ("memory", "memory, MiB", 1 << 20, 0),
)
FIRST = ("first", "first call, s", 1, 2)
ON_GPU = ("gpu", "GPU memory, MiB", 1 << 20, 0)


def parse_bytes(text: str) -> int:
    """``1GiB``, ``512MiB`` or a number."""
    for suffix, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if text.endswith(suffix):
            return int(float(text.removesuffix(suffix)) * factor)
    return int(text)


class Trainer:
    """Parameters with Adam whose whole state changes at every step."""

    def __init__(self, nbytes: int, device: str = "cpu") -> None:
        self.cuda = device == "cuda"
        elements = nbytes // 3 // 4 // TENSORS
        generator = torch.Generator().manual_seed(0)
        self.parameters = [
            torch.nn.Parameter(torch.randn(elements, generator=generator).to(device)) for _ in range(TENSORS)
        ]
        self.gradient = torch.randn(elements, generator=generator).to(device)
        self.optimizer = torch.optim.Adam(self.parameters, fused=True)
        self.step()

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = self.gradient
        self.optimizer.step()
        if self.cuda:
            torch.cuda.synchronize()

    def make_private(self) -> None:
        """Gives each tensor of the state memory of its own, which no other process sees."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
            own = self.optimizer.state[parameter]
            own.update({key: value.clone() for key, value in own.items()})

    def state(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for i, parameter in enumerate(self.parameters):
            tensors[f"p{i}"] = parameter.detach()
            tensors[f"m{i}"] = self.optimizer.state[parameter]["exp_avg"]
            tensors[f"v{i}"] = self.optimizer.state[parameter]["exp_avg_sq"]
        return tensors


def checksums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {k: zlib.crc32(t.cpu().numpy().data.cast("B")) for k, t in tensors.items()}


def busy_seconds() -> float:
    """Core-seconds of the machine that were not idle, since boot."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    ticks = [int(f) for f in fields[:8]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def memory_in_use(cuda: bool) -> int:
    """Anonymous and shared memory of the machine; with a GPU all but the page cache."""
    kib = {name: int(rest.split()[0]) for name, _, rest in (
        line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())}  # fmt: skip
    if not cuda:
        return (kib["AnonPages"] + kib["Shmem"]) * 1024
    cache = kib["Buffers"] + kib["Cached"] - kib["Shmem"] + kib["SReclaimable"]
    return (kib["MemTotal"] - kib["MemFree"] - cache) * 1024


class Peak:
    """Samples `memory_in_use` until it is stopped."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self.bytes = memory_in_use(cuda)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.bytes = max(self.bytes, memory_in_use(self._cuda))

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.bytes


class Way:
    """A way of saving: `start` returns what waits until the save is durable."""

    def __init__(self, start: Callable[[dict[str, Any], str], Callable[[], Any]],
                 load: Callable[[dict[str, Any], str], dict[str, Any]],
                 prepare: Callable[[], None] = lambda: None,
                 finish: Callable[[], None] = lambda: None,
                 before_step: Callable[[], None] = lambda: None) -> None:
        self.start = start
        self.load = load
        self.prepare = prepare
        self.finish = finish
        self.before_step = before_step


def load_torch(_: dict[str, Any], path: str) -> dict[str, Any]:
    return torch.load(os.path.join(path, "state.pt"), mmap=True)


def torch_save(tensors: dict[str, Any], path: str) -> Callable[[], Any]:
    os.mkdir(path)
    file = os.path.join(path, "state.pt")
    torch.save(tensors, file)
    sync_file(file)
    sync_file(path)
    return lambda: None


def forked_torch_save(tensors: dict[str, Any], path: str) -> Callable[[], Any]:
    os.mkdir(path)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch_save_into(tensors, path)
            status = 0
        finally:
            os._exit(status)

    def wait() -> None:
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"the forked child ended with {status}"

    return wait


def torch_save_into(tensors: dict[str, Any], path: str) -> None:
    torch.set_num_threads(1)
    file = os.path.join(path, "state.pt")
    torch.save(tensors, file)
    sync_file(file)
    sync_file(path)


def load_dcp(tensors: dict[str, Any], path: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    target = {k: torch.empty_like(t) for k, t in tensors.items()}
    dcp.load(target, checkpoint_id=path)
    return target


def dcp_writer(path: str) -> Any:
    import torch.distributed.checkpoint as dcp

    return dcp.FileSystemWriter(path, sync_files=True, single_file_per_rank=True)


def dcp_save(tensors: dict[str, Any], path: str) -> Callable[[], Any]:
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, storage_writer=dcp_writer(path))
    return lambda: None


def end_checkpoint_process() -> None:
    """Ends the process that the framework keeps for its process mode, and waits until it is gone."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    kept, executor._CHECKPOINT_PROCESS = executor._CHECKPOINT_PROCESS, None
    if kept is not None:
        kept._send(executor._CheckpointSaveProcessControlOpts.TERMINATE)
        kept._save_process.join()


def dcp_async(process: bool, tuned: bool, staged_max: int = 0, cuda: bool = False) -> Way:
    """The framework's own async_save; with a cap, through Holdfast's writer, which is the stager, too."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    staging: dict[str, Any] = {"staged": None, "stager": None}

    def start(tensors: dict[str, Any], path: str) -> Callable[[], Any]:
        options: dict[str, Any] = {}
        if tuned:
            # The best flags, and what a CPU allows of them: a cache in shared memory, filled by a thread.
            if staging["stager"] is None:
                staging["stager"] = DefaultStager(
                    StagingOptions(use_pinned_memory=cuda, use_shared_memory=True,
                                   use_async_staging=True, use_non_blocking_copy=cuda)
                )
            options["async_stager"] = staging["stager"]
        writer = holdfast.dcp.StorageWriter(path, staging_bytes_max=staged_max) if staged_max else dcp_writer(path)
        answer: Any = dcp.async_save(tensors, storage_writer=writer, async_checkpointer_type=kind, **options)
        if hasattr(answer, "upload_completion"):
            staging["staged"] = answer.staging_completion
            return answer.upload_completion.result
        return answer.result

    def before_step() -> None:
        if staging["staged"] is not None:
            staging["staged"].result()
            staging["staged"] = None

    def finish() -> None:
        end_checkpoint_process()
        if staging["stager"] is not None:
            staging["stager"].close()
            staging["stager"] = None
        if staged_max:
            holdfast.flush()
            holdfast.dcp.Stager().close()
            holdfast.trim()

    def prepare() -> None:
        if staged_max:
            holdfast.configure(arena_bytes=WINDOW)

    return Way(start, load_dcp, prepare=prepare, finish=finish, before_step=before_step)


def holdfast_way(cap: int, dcp: bool, late: Sequence[torch.optim.Optimizer] = ()) -> Way:
    def start(tensors: dict[str, Any], path: str) -> Callable[[], Any]:
        if dcp:
            answer: Any = holdfast.dcp.async_save(tensors, checkpoint_id=path)
            return answer.result
        return holdfast.save_async(tensors, path, late=late).wait

    def load(tensors: dict[str, Any], path: str) -> dict[str, Any]:
        return load_dcp(tensors, path) if dcp else holdfast.load(path)

    def finish() -> None:
        holdfast.flush()
        holdfast.trim()

    return Way(start, load, prepare=lambda: holdfast.configure(arena_bytes=cap), finish=finish)


def all_ways(nbytes: int, trainer: Trainer) -> dict[str, Way]:
    whole, eighth, cuda = nbytes + WINDOW, max(16 << 20, nbytes // 8), trainer.cuda
    ways = {
        "holdfast": holdfast_way(whole, dcp=False),
        "holdfast, late": holdfast_way(whole, dcp=False, late=[trainer.optimizer]),
        "holdfast.dcp": holdfast_way(whole, dcp=True),
        "holdfast, cap 1/8": holdfast_way(eighth, dcp=False),
        "holdfast.dcp, cap 1/8": holdfast_way(eighth, dcp=True),
        "holdfast.dcp.StorageWriter, thread": dcp_async(process=False, tuned=False, staged_max=whole),
        "holdfast.dcp.StorageWriter, process": dcp_async(process=True, tuned=False, staged_max=whole),
        "torch.save": Way(torch_save, load_torch),
        "torch.save in a forked child": Way(forked_torch_save, load_torch),
        "dcp.save": Way(dcp_save, load_dcp),
        "dcp.async_save thread": dcp_async(process=False, tuned=False),
        "dcp.async_save thread, tuned": dcp_async(process=False, tuned=True, cuda=cuda),
        "dcp.async_save process": dcp_async(process=True, tuned=False),
        "dcp.async_save process, tuned": dcp_async(process=True, tuned=True, cuda=cuda),
    }
    # The CPU has no late copies, and a forked child no GPU.
    del ways["torch.save in a forked child" if cuda else "holdfast, late"]
    return ways


def window(trainer: Trainer, steps: int, way: Way | None = None) -> float:
    """Seconds of some steps."""
    begin = time.perf_counter()
    for _ in range(steps):
        if way is not None:
            way.before_step()
        trainer.step()
    return time.perf_counter() - begin


class OneSave:
    """A save under way, and when it became durable."""

    def __init__(self, way: Way, tensors: dict[str, Any], path: str) -> None:
        self.begin = time.perf_counter()
        self._wait = way.start(tensors, path)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        self._error: BaseException | None = None
        try:
            self._wait()
        except BaseException as error:
            self._error = error
        self.durable = time.perf_counter()

    def wait(self) -> float:
        """Waits until it is durable, and returns that point in time; raises what the save has raised."""
        self._watcher.join()
        if self._error is not None:
            raise self._error
        return self.durable


def window_with_saves(trainer: Trainer, steps: int, way: Way, paths: list[str]) -> tuple[float, float, list[OneSave]]:
    """Seconds of the window, those of them in the calls, and the saves."""
    tensors = trainer.state()
    saves: list[OneSave] = []
    blocked = 0.0
    begin = time.perf_counter()
    for number, path in enumerate(paths):
        called = time.perf_counter()
        if saves:
            saves[-1].wait()
        saves.append(OneSave(way, tensors, path))
        blocked += time.perf_counter() - called
        window(trainer, steps * (number + 1) // len(paths) - steps * number // len(paths), way)
    return time.perf_counter() - begin, blocked, saves


def measure(trainer: Trainer, steps: int, way: Way, path: str, saves: int) -> dict[str, Any]:
    """One window without a save and one with, and whether what is on disk is what was there."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier way's allocations left in the heap
    baseline = memory_in_use(trainer.cuda)
    # What a way keeps between saves (staging memory, a process) is there before its second one; it
    # counts as memory all the same.
    way.prepare()
    tensors = trainer.state()
    begin = time.perf_counter()
    wait = way.start(tensors, path)
    first = time.perf_counter() - begin
    wait()
    way.before_step()
    shutil.rmtree(path)
    os.sync()
    busy = busy_seconds()
    plain = window(trainer, steps)
    plain_busy = busy_seconds() - busy

    before = checksums(tensors)
    if trainer.cuda:
        torch.cuda.reset_peak_memory_stats()
    on_gpu = torch.cuda.memory_allocated()
    peak = Peak(trainer.cuda)
    busy = busy_seconds()
    paths = [f"{path}-{number}" for number in range(saves)]
    seconds, blocked, begun = window_with_saves(trainer, steps, way, paths)
    ended = time.perf_counter()
    # Saving may outlive the window: the trainer's own core-seconds in that time are not the save's.
    rest = max(0.0, begun[-1].wait() - ended)
    memory = peak.stop()
    row = {
        "blocked": blocked / saves,
        "lost": (seconds - plain) / saves,
        "durable": statistics.median(save.durable - save.begin for save in begun),
        "cpu": (busy_seconds() - busy - plain_busy) / saves,
        "memory": memory - baseline,
        "gpu": torch.cuda.max_memory_allocated() - on_gpu,
        "window": plain,
        "outlived": rest,
        "first": first,
    }
    row["sound"] = checksums(way.load(tensors, paths[0])) == before
    for each in paths:
        shutil.rmtree(each)
    way.finish()
    return row


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(result: dict[str, Any], columns: Sequence[tuple[str, str, int, int]] = COLUMNS) -> str:
    lines = [
        "| way | " + " | ".join(title for _, title, _, _ in columns) + " | bytes right |",
        "| --- |" + " --- |" * (len(columns) + 1),
    ]
    for way, row in result["ways"].items():
        cells = [
            f"{row[k]['median'] / scale:.{digits}f} ({row[k]['min'] / scale:.{digits}f} to "
            f"{row[k]['max'] / scale:.{digits}f})"
            for k, _, scale, digits in columns
        ]
        lines.append(f"| {way} | " + " | ".join(cells) + f" | {'yes' if row['sound'] else 'NO: excluded'} |")
    return "\n".join(lines)


def sound_ways(result: dict[str, Any]) -> dict[str, Any]:
    return {way: row for way, row in result["ways"].items() if row["sound"]}


def ratios(result: dict[str, Any], ours_named: Sequence[str] = OURS) -> dict[str, dict[str, float | None]]:
    """By way: time lost with ours as a part of that with it, None if it lost none; durable by raw write."""
    sound = sound_ways(result)
    lost = {way: row["lost"]["median"] for way, row in sound.items()}
    return {
        way: {
            **{f"lost of {ours} / its": max(0.0, lost[ours]) / lost[way] if lost[way] > 0 else None
               for ours in ours_named if ours in sound},
            "durable / raw": row["durable"]["median"] / result["raw_write"]["median"],
        }
        for way, row in sound.items()
    }


def ratio_table(result: dict[str, Any]) -> str:
    rows = result["ratios"]
    names = list(next(iter(rows.values()), {}))
    lines = ["| way | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for way, row in rows.items():
        cells = ["-" if row[n] is None else f"{row[n]:.2f}" for n in names]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ways = list(sound_ways(result))
    figure, axes = plt.subplots(1, 3, figsize=(13, 0.45 * len(ways) + 1.5), sharey=True)
    for axis, (key, title, scale) in zip(
        axes,
        (("lost", "trainer time lost, s", 1), ("durable", "until durable, s", 1),
         ("memory", "extra memory, GiB", 1 << 30)),
        strict=True,
    ):
        values = [result["ways"][w][key]["median"] / scale for w in ways]
        colors = ["#1f6f8b" if w.startswith("holdfast") else "#b0b0b0" for w in ways]
        axis.barh(ways, values, color=colors)
        axis.set_title(title)
        axis.invert_yaxis() if axis is axes[0] else None
        for i, value in enumerate(values):
            axis.text(max(value, 0), i, f" {value:.2f}", va="center", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--dir", required=True)
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=1, help="in a window")
    parser.add_argument("--window", type=float, default=0,
                        help="seconds of a window, for each save longer than any way's upload; default 4 for each GiB and save")
    parser.add_argument("--ways", help="only these, separated by ';'")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--bench", metavar="PROGRAM", help="holdfast-bench, for its raw write")
    return parser.parse_args()


def run(arguments: argparse.Namespace, trainer: Trainer, ways: dict[str, Way], ours: Sequence[str],
        columns: Sequence[tuple[str, str, int, int]]) -> None:  # fmt: skip
    """Measures the ways in turns, and prints and writes what was found."""
    begin = time.perf_counter()
    trainer.step()
    seconds = arguments.window or 4 * arguments.saves * arguments.bytes / (1 << 30)
    steps = max(4, round(seconds / (time.perf_counter() - begin)))
    if arguments.ways:
        ways = {w: ways[w] for w in arguments.ways.split(";")}
    rows: dict[str, list[dict[str, Any]]] = {w: [] for w in ways}
    raw = []
    for round_ in range(arguments.rounds):
        raw.append(raw_disk.write(arguments.dir, arguments.bytes))
        if arguments.bench:
            raw[-1] = min(raw[-1], raw_disk.by_program(arguments.bench, "write", arguments.dir, arguments.bytes))
        for name, way in list(ways.items()):
            try:
                row = measure(trainer, steps, way, os.path.join(arguments.dir, f"cost-{os.getpid()}"), arguments.saves)
            except Exception as error:
                if name.startswith("holdfast"):
                    raise
                print(f"round {round_}: {name} is left out: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                del ways[name], rows[name]
                continue
            rows[name].append(row)
            print(f"round {round_}: {name}: lost {row['lost']:.2f} s, durable {row['durable']:.2f} s"
                  f"{'' if row['sound'] else ', BYTES DIFFER'}", file=sys.stderr, flush=True)
    result = {
        "bytes": arguments.bytes,
        "rounds": arguments.rounds,
        "steps": steps,
        "saves": arguments.saves,
        "torch": torch.__version__,
        "raw_write": spread(raw),
        "ways": {
            name: {
                **{k: spread([r[k] for r in many]) for k in many[0] if k != "sound"},
                "sound": all(r["sound"] for r in many),
            }
            for name, many in rows.items()
        },
    }
    result["ratios"] = ratios(result, ours)
    print(table(result, columns), ratio_table(result), sep="\n\n")
    print(f"\nraw O_DIRECT write with fsync: {result['raw_write']['median']:.2f} s; "
          f"{steps} steps and {arguments.saves} saves a window")
    outlived = [way for way, row in result["ways"].items() if row["outlived"]["median"] > 0]
    if outlived:
        print(f"too short a window, more is lost than the table says: {', '.join(outlived)}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1))
    if arguments.plot:
        plot(result, arguments.plot)


def begin_process() -> None:
    """A process group of this process alone, and one core for the training: the other core is the saves'."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(PORT))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the state")
    arguments = arguments_of(parser)
    begin_process()
    trainer = Trainer(arguments.bytes, arguments.device)
    ours, columns = ((*OURS, "holdfast, late"), (*COLUMNS, ON_GPU)) if trainer.cuda else (OURS, COLUMNS)
    run(arguments, trainer, all_ways(arguments.bytes, trainer), ours, columns)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
