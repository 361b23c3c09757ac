"""What Megatron's asynchronous callers, and ours, say of a fault: which rank hears of it, and after how many seconds.

    python caller_faults.py --dir DIR [--callers "CALLER;..."] [--faults "FAULT;..."] [--wait SECONDS] [--json FILE]

Two gloo ranks save once without a fault, and then once more or schedule a request. The fault is on rank 1:

killed     the process that writes is killed (SIGKILL)
limit      the process that writes gets a limit of its file sizes (RLIMIT_FSIZE, EFBIG). The stock writers have two files and write
           the first one in a second thread; that one alone is larger than the limit. Ours has one file, larger than the limit
foreign    a request of another class is scheduled: the `AsyncRequest` of nvidia-resiliency-ext in Megatron's queues and in ours,
           that of Megatron in the queues of nvidia-resiliency-ext. There is no fault but that
request    a request of the queue's own class is scheduled, whose function raises ENOSPC

The writer is held until the fault is there. From then on both ranks call `maybe_finalize_async_calls` every 5 ms, as a training does
after each step. "holdfast.megatron synchronous" saves without a queue: its call ends or raises; of the faults it has the first two. Seconds are counted from the fault. A rank that has neither an error nor a finalized request after `--wait` seconds
(default 30) hangs. "observers" is when those of the rank itself were told. "errno" and "path" say whether the error has them.
Without a GPU, the stand-in of the tests answers what the callers ask CUDA for.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from framework_ways import OUR_CALLER, POLL, held_worker, made_late, megatron_callers, prepare_process

FAULTS = {
    "killed": "its writer is killed",
    "limit": "EFBIG in its second thread",
    "foreign": "a request of another class",
    "request": "a request that raises ENOSPC",
}
SYNCHRONOUS = f"{OUR_CALLER} synchronous"
RANKS = 2
FAULTY = 1  # the rank with the fault
WAIT = 30.0
START_MAX = 120.0  # seconds until a fault is there: imports, processes, and a save without a fault
KIB = 1 << 10
# Three tensors: two of them in the first of two files.
TENSOR = 300 * KIB
FILE_MAX = 450 * KIB
TEXT_MAX = 120

Connection = Any  # of `multiprocessing`


def write_name(path: str, *_: Any) -> None:
    """The function of a request."""
    Path(path).write_text("written")


def raise_no_space(path: str, *_: Any) -> None:
    """The function of a request that fails."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def request_of(kind: str, fault: str, path: str) -> Any:
    """A request that no library has made, in the class of one.

    Args:
        kind: ``mcore`` or ``nvrx``, whose class it has.
        fault: of `FAULTS`.
        path: what its function writes.
    """
    if kind == "nvrx":
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
    else:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    fails = fault == "request" and path.endswith(str(FAULTY))
    return AsyncRequest(raise_no_space if fails else write_name, (path,), [], async_fn_kwargs={})


class Rank:
    """One rank of a scenario.

    Args:
        rank: of this process.
        caller: a name of `megatron_callers`.
        fault: of `FAULTS`.
        directory: for the checkpoints.
        parent: where events go, each a name, a point in time and details.
    """

    def __init__(self, rank: int, caller: str, fault: str, directory: str, parent: Connection) -> None:
        self.rank, self.name, self.fault, self.directory, self.parent = rank, caller, fault, directory, parent
        self.is_ours = caller.startswith(OUR_CALLER)

    def say(self, event: str, **details: Any) -> None:
        self.parent.send((event, time.monotonic(), details))

    def run(self) -> None:
        import torch
        import torch.distributed as dist

        from holdfast import events

        prepare_process()
        dist.init_process_group("gloo", init_method=f"file://{self.directory}/store", rank=self.rank,
                                world_size=RANKS, timeout=timedelta(seconds=600))  # fmt: skip
        worker = held_worker() if self.is_ours else 0
        if worker:
            os.kill(worker, signal.SIGCONT)
        self.caller = megatron_callers()[OUR_CALLER if self.is_ours else self.name]
        self.caller.begin()
        self.caller.strategy.thread_count = 2  # ours writes one file all the same
        names = [f"{self.rank}.{n}" for n in range(3)]
        # As pinned memory is for another process.
        self.tensors = {name: torch.full((TENSOR // 4,), 1.0).share_memory_() for name in names}
        self.caller.save(self.tensors, f"{self.directory}/first")
        self._finalize()
        with events.Handle(lambda save, report, error: self.say("told", error=self._said(error))):
            if self.name == SYNCHRONOUS:
                save = self._held_synchronous_save(worker)
            elif self.fault in ("killed", "limit"):
                self._save(worker)
            else:
                self._schedule()
            try:
                if self.name == SYNCHRONOUS:
                    save()
                self._finalize()
                said = None
            except BaseException as error:
                said = self._said(error)
            self.say("ended", error=said, note=self._note())

    def _finalize(self) -> None:
        while self.caller.queue.get_num_unfinalized_calls():
            self.caller.queue.maybe_finalize_async_calls()
            time.sleep(POLL)

    def _save(self, worker: int) -> None:
        """Saves with the writer held, makes the fault, and lets the writer go."""
        import torch.distributed as dist

        if worker:
            os.kill(worker, signal.SIGSTOP)
        flag = f"{self.directory}/go-{self.rank}"
        self.caller.save(self.tensors, f"{self.directory}/second", lambda r: r if worker else made_late(r, flag))
        writer = worker or self.caller.queue.async_calls[-1].async_caller.process.pid
        dist.barrier()
        self._make_fault(writer)
        Path(flag).touch()
        if worker:
            _let_go(worker)

    def _make_fault(self, writer: int) -> None:
        if self.rank == FAULTY and self.fault == "killed":
            os.kill(writer, signal.SIGKILL)
        elif self.rank == FAULTY:
            resource.prlimit(writer, resource.RLIMIT_FSIZE, (FILE_MAX, resource.RLIM_INFINITY))
        self.say("fault")

    def _held_synchronous_save(self, worker: int) -> Callable[[], None]:
        """The call; a thread makes the fault when all ranks are in it, and lets the writer go."""
        from holdfast import events

        os.kill(worker, signal.SIGSTOP)
        begun = [Path(f"{self.directory}/begun-{rank}") for rank in range(RANKS)]

        def make_fault() -> None:
            while not events.in_flight():
                time.sleep(POLL)
            begun[self.rank].touch()
            while not all(path.exists() for path in begun):
                time.sleep(POLL)
            self._make_fault(worker)
            _let_go(worker)

        threading.Thread(target=make_fault, daemon=True).start()
        return lambda: self.caller.save_at_once(self.tensors, f"{self.directory}/second")

    def _schedule(self) -> None:
        import torch.distributed as dist

        own = "nvrx" if self.name.startswith("nvrx") else "mcore"
        other = "mcore" if own == "nvrx" else "nvrx"
        request = request_of(other if self.fault == "foreign" else own, self.fault, self._path())
        dist.barrier()
        self.say("fault")
        self.caller.queue.schedule_async_request(request)

    def _path(self) -> str:
        return f"{self.directory}/request-{self.rank}"

    def _said(self, error: BaseException | None) -> dict[str, Any] | None:
        return None if error is None else describe(error, self.directory)

    def _note(self) -> str:
        """What a finalized request has left."""
        if self.fault in ("killed", "limit"):
            return "committed" if os.path.exists(f"{self.directory}/second/.metadata") else "no .metadata"
        return "run" if os.path.exists(self._path()) else "nothing was written"


def _let_go(worker: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGCONT)


def describe(error: BaseException, directory: str) -> dict[str, Any]:
    """An error: its text, and whether it has an errno and a path below a directory."""
    failures = getattr(error, "failures", None)
    causes = [found[0] for found in failures.values()] if failures else [error]
    said = [f"{type(cause).__name__}: {cause}" for cause in causes] if failures else [str(error)]
    text = "; ".join(each.splitlines()[0] for each in said if each)
    numbers = [getattr(cause, "errno", None) for cause in causes]
    return {
        "kind": type(error).__name__,
        "ranks": list(failures) if failures else [],
        "text": text.replace(directory + "/", ""),
        "errno": next((errno.errorcode.get(number, str(number)) for number in numbers if number), ""),
        "path": any(directory in str(cause) for cause in causes),
    }


def run_rank(*arguments: Any) -> None:
    """The process of a rank, which leads a group."""
    os.setsid()
    # The log of the stock writers.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rank = Rank(*arguments)
    try:
        rank.run()
    except BaseException:
        rank.say("broken", text=traceback.format_exc())


def end(process: Any) -> None:
    """Ends a rank and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def scenario(caller: str, fault: str, directory: str, wait: float) -> list[dict[str, Any]]:
    """What each rank has said: after how many seconds it was told and its request ended, and how.

    Raises:
        RuntimeError: a rank did not come to the fault.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["holdfast.dcp", "megatron.core.dist_checkpointing"])
    scratch = tempfile.mkdtemp(dir=directory)
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [
        context.Process(target=run_rank, args=(rank, caller, fault, scratch, pipes[rank][1])) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    readers = [reader for reader, _ in pipes]
    heard: list[dict[str, Any]] = [{} for _ in readers]
    try:
        deadline = time.monotonic() + START_MAX
        while not all("ended" in each for each in heard) and time.monotonic() < deadline:
            for reader in multiprocessing.connection.wait(readers, POLL):
                event, at, details = reader.recv()  # type: ignore[union-attr]
                if event == "broken":
                    raise RuntimeError(f"{caller}, {fault}: {details['text']}")
                heard[readers.index(reader)].setdefault(event, (at, details))  # type: ignore[arg-type]
                if event == "fault" and all("fault" in each for each in heard):
                    deadline = heard[FAULTY]["fault"][0] + wait
    finally:
        for process in processes:
            end(process)
        shutil.rmtree(scratch, ignore_errors=True)
    if not all("fault" in each for each in heard):
        raise RuntimeError(f"{caller}, {fault}: its ranks did not come to the fault in {START_MAX:.0f} s")
    begin = heard[FAULTY]["fault"][0]
    return [{event: {"seconds": at - begin, **details} for event, (at, details) in each.items()} for each in heard]


def shown(of_rank: dict[str, Any], wait: float) -> str:
    """What a rank has heard, in words."""
    ended = of_rank.get("ended")
    if ended is None:
        return f"hangs: nothing in {wait:.0f} s"
    after = f"{ended['seconds']:.2f} s"
    error = ended["error"]
    if error is None:
        return f"{after}: finalized, {ended['note']}"
    has = [error["errno"] or "no errno", "path" if error["path"] else "no path"]
    text = error["text"] if len(error["text"]) <= TEXT_MAX else error["text"][:TEXT_MAX] + "..."
    told = of_rank.get("told")
    early = f"observers {told['seconds']:.2f} s, " if told and told["error"] else ""
    return f"{early}{after}: {error['kind']} ({', '.join(has)}) `{text}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--callers", help="default: all that are installed")
    parser.add_argument("--faults", help=f"default: {';'.join(FAULTS)}")
    parser.add_argument("--wait", type=float, default=WAIT)
    parser.add_argument("--json", type=Path, help="results")
    arguments = parser.parse_args()
    known = [*megatron_callers(), SYNCHRONOUS]
    callers = arguments.callers.split(";") if arguments.callers else known
    faults = arguments.faults.split(";") if arguments.faults else list(FAULTS)
    unknown = sorted({*callers} - {*known} | {*faults} - {*FAULTS})
    if unknown:
        sys.exit(f"there is no {', '.join(unknown)}; callers: {'; '.join(known)}; faults: {'; '.join(FAULTS)}")
    results: dict[str, dict[str, Any]] = {}
    print("| fault on rank 1 | caller | rank 1 | rank 0 |\n| --- | --- | --- | --- |", flush=True)
    for fault in faults:
        for caller in callers:
            if caller == SYNCHRONOUS and fault not in ("killed", "limit"):
                continue
            found = scenario(caller, fault, str(arguments.dir), arguments.wait)
            results.setdefault(fault, {})[caller] = found
            cells = [shown(found[rank], arguments.wait) for rank in (FAULTY, 1 - FAULTY)]
            print(f"| {FAULTS[fault]} | {caller} | {cells[0]} | {cells[1]} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
