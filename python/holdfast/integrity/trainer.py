"""One rank of a campaign's trainer: it saves as a round says, does to itself what the round says, and tells it.

A line of JSON goes to the driver for each call, its return, each outcome and each event. What is not told did not
happen: the driver's model believes nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

import holdfast
import holdfast.dcp
from holdfast import _devices, handle
from holdfast._durable import sync_directory
from holdfast.integrity import injection, megatron, memory_groups, readers, schedule, sealed_memory, states
from holdfast.integrity.processes import children, held, join, left, limited, see, send
from holdfast.integrity.slow_device import SlowDevice

# Seconds: far more than a busy machine needs. What ends by a deadline here has an event as its cause.
TIME_OUTCOME_MAX = 180.0
TIME_LIVENESS_MAX = 60.0
TIME_STALLED_MAX = 60.0
TIME_SETTLE_MAX = 60.0  # in which what a save held has to go
TIME_END_MAX = 180.0  # in which a process ends that has closed its pipe
TIME_MISSED = 8.0  # after which a rank that was killed counts as gone
TIME_HUNG = 3.0  # the same of a worker that hangs
_ENDED = ("done", "failed", "cancelled")
_COMMIT = ("syncing", "reading back", "manifest", "waiting for ranks", "committing")


def options_of(round_: dict[str, Any], actions: list[dict[str, Any]]) -> dict[str, Any]:
    """How saves are made in a life of a round."""
    kinds = {a["event"]["kind"] for a in actions if "event" in a}
    return {
        "arena_bytes": round_.get("arena", schedule.ARENA), "launcher": round_["launcher"], "engine": round_["engine"],
        "read_back": round_["read_back"], "second_look": round_["second_look"], "trainer_death": round_["trainer_death"],
        "time_liveness_max": TIME_MISSED if kinds & {*schedule.DEADLY, "step"} else TIME_LIVENESS_MAX,
        "time_memory_max": TIME_OUTCOME_MAX / 2,
        "time_stalled_max": TIME_HUNG if "hang-worker" in kinds else TIME_STALLED_MAX,
        "time_ranks_max": TIME_OUTCOME_MAX / 2,
    }  # fmt: skip


class Trainer:
    """One process of a job in one of its lives.

    Attributes:
        has_group: whether there is a process group also for one rank.
    """

    has_group = False

    def __init__(self, rank: int, round_: dict[str, Any], life: int, job: int, directory: str, out: int) -> None:
        self.rank, self.job = rank, job
        self.round = round_
        self.actions = round_["lives"][life]
        self.directory = directory
        self.format = schedule.format_of(round_)
        self.is_dcp = self.format == "dcp"
        self._out = out
        self.outcomes: list[threading.Event] = []
        self.hits: list[threading.Thread] = []
        is_watched = any(a.get("event", {}).get("kind") in sealed_memory.DEAD for a in self.actions)
        self._memory = sealed_memory.SealedMemory(self.tell, is_watched)
        self._device: SlowDevice | None = None
        self._moves = 0
        self._starting = threading.Lock()  # while this process has a child of its own that is no worker
        self._rate = 0
        self.over: set[int] = set()  # numbers of the saves that have ended
        self.exiting = False  # it ends in the middle of its script
        self.is_injected = False  # the driver counts this process's system calls
        self._options = {**options_of(round_, self.actions), "on_sealed": self._memory.sealed}
        self._checkpointer: holdfast.Checkpointer | None = None

    def tell(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "rank": self.rank, "job": self.job, "at": time.time_ns(), **values})
        os.write(self._out, line.encode() + b"\n")
        if self.is_injected:
            injection.mark(f"{event} {values.get('n', 0)}")

    # ---- The life.

    def live(self) -> None:
        """Runs the life. The process may run another one if this returns.

        Raises:
            SystemExit: the life has ended its process.
        """
        try:
            with self.telling("crashed"):
                self.run()
        except Exiting:
            self.exiting = True
            with self.telling("crashed"):
                self.tell("exiting")
                self._wait({})
                with contextlib.suppress(holdfast.Error):
                    holdfast.flush(TIME_OUTCOME_MAX)
                self.tell("end")
            raise
        self.tell("rest")

    @contextlib.contextmanager
    def telling(self, event: str) -> Iterator[None]:
        """Tells an error within."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exiting):
                self._tell_failure(event, 0, error)
            raise

    def run(self) -> None:
        if self.round["device"] == "stand-in":
            self._device = SlowDevice(self.round["number"])
            with _devices.stand_in("cpu", self._device):
                self._run()
        else:
            self._run()

    def _run(self) -> None:
        holdfast.configure(stale_warning=False)
        before = held(self._in_group)
        self._open()
        for action in self.actions:
            {"save": self._save, "wait": self._wait, "load": self._load, "move": self._move,
             "recover": self._recover}[action["do"]](action)  # fmt: skip
        self._wait({})
        self._join_hits()
        self._close()
        self._memory.look()
        self._settle(before)
        self.tell("end")

    def _join_hits(self) -> None:
        while self.hits:
            self.hits.pop().join()
        self._memory.leave()
        if self._device:
            self._device.lose_next(None)

    def _open(self, rate: int = 0) -> None:
        options = {**self._options, "bytes_per_second_max": rate}
        if self.round["door"].startswith("checkpointer"):
            of_save = {} if self.is_dcp else {"when_full": self.round["when_full"]}
            self._checkpointer = holdfast.Checkpointer(
                self.directory, format="dcp" if self.is_dcp else "holdfast", replace=self.round["replace"],
                keep_last=self.round["keep_last"] or None, **of_save, **options,
            )  # fmt: skip
        else:
            holdfast.configure(**options)

    def _close(self) -> None:
        with contextlib.suppress(holdfast.Error):
            holdfast.flush(TIME_OUTCOME_MAX)
        if self._checkpointer is not None:
            with contextlib.suppress(holdfast.Error):
                self._checkpointer.close()
            self._checkpointer = None
        else:
            end = time.monotonic() + TIME_SETTLE_MAX
            while holdfast.staging().get("bytes_held") and time.monotonic() < end:
                time.sleep(0.002)  # of a dead worker: it is configured when it is free
            with contextlib.suppress(holdfast.Error):
                holdfast.configure(arena_bytes=schedule.ARENA, on_sealed=lambda *_: None)

    def _settle(self, before: collections.Counter[str]) -> None:
        """Tells what is held more than before the first save, once threads that end have ended."""
        if more := left(before, TIME_SETTLE_MAX, self._in_group):
            self.tell("leak", more=more)

    @property
    def _in_group(self) -> bool:
        return self.has_group or self.round["ranks"] > 1

    # ---- Actions.

    def _state(self, action: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """The number of a save, the tensors of its state, and the state as it is saved."""
        number = action["n"] + self.job * schedule.SAVES_OF_JOB
        made = states.make(self.round["seed"], number, self.rank, action["spec"])
        return number, made, states.as_dcp(made, self.rank) if self.is_dcp else made

    def _save(self, action: dict[str, Any]) -> None:
        number, made, state = self._state(action)
        event = action.get("event")
        mine = event if event and event["rank"] == self.rank else None
        self._set_rate(action.get("rate", 0))
        if event and event["kind"] in (*schedule.CHANGES, "lose-copy"):
            self._wait({})  # what is sealed then, and copied, is of this save; on all ranks, which may wait for each other
            held = (self._checkpointer or holdfast).staging().get("bytes_held")
            self._memory.watch(mine is not None and not held and action["spec"]["bytes"] < schedule.ARENA // 2)
        if self.round["door"] == schedule.MEGATRON:
            self._make_directory()
        self.tell("call", n=number)
        if mine:
            self._begin_event(number, mine)
        try:
            with self._limits(mine):
                save = self._call(action, state)
        except Exiting:
            raise
        except BaseException as error:
            self.over.add(number)
            self._join_hits()
            self._tell_failure("refused", number, error)
            return
        finally:
            if action["mutate"]:
                states.mutate(made)
        self.tell("called", n=number, skipped=bool(getattr(save, "skipped", False)))
        durable = getattr(save, "durable", save)
        ended = threading.Event()
        self.outcomes.append(ended)
        path = getattr(save, "path", None) or os.path.join(self.directory, self.name_of(action))

        def done(future: Any) -> None:
            error = future.exception()
            if error is None:
                report = future.result()
                self.tell("durable", n=number, path=path, engine=report.get("engine", "") if isinstance(report, dict) else "")
            else:
                self._tell_failure("failed", number, error, skipped=getattr(save, "skipped", False))
            self.over.add(number)
            ended.set()

        durable.add_done_callback(done)
        if mine and (mine["kind"] in (*schedule.CHANGES, "limit-size", "lose-copy") or mine.get("in_flight")):
            self._await_part(save, ended)
            self._join_hits()

    def _await_part(self, save: Any, ended: threading.Event) -> None:
        """Waits until this rank's part of a save has ended."""
        ended.wait(TIME_OUTCOME_MAX)

    def name_of(self, action: dict[str, Any]) -> str:
        return schedule.name_of(self.round, action, self.job)

    def _call(self, action: dict[str, Any], state: dict[str, Any]) -> Any:
        name, round_ = self.name_of(action), self.round
        path = os.path.join(self.directory, name)
        if self._checkpointer is not None:
            return self._checkpointer.save_async(state, action["step"], name=name)
        if self.is_dcp:
            return holdfast.dcp.async_save(state, checkpoint_id=path)
        if self.format == "file":
            return holdfast.save_file(state, path, step=action["step"], replace=round_["replace"], when_full=round_["when_full"])
        return holdfast.save_async(
            state, path, step=action["step"], replace=round_["replace"], when_full=round_["when_full"],
            keep_last=round_["keep_last"],
        )  # fmt: skip

    def _set_rate(self, rate: int) -> None:
        """The rate belongs to a runtime: with the functions it is set between saves alone."""
        if self._checkpointer is None:
            if rate == self._rate:
                return
            self._wait({})
            with contextlib.suppress(holdfast.Error):
                holdfast.flush(TIME_OUTCOME_MAX)
            with contextlib.suppress(holdfast.Error):
                holdfast.configure(bytes_per_second_max=rate)
                self._rate = rate
        elif rate != self._rate:
            self._wait({})
            with contextlib.suppress(holdfast.Error):
                self._checkpointer.close()
            self._open(rate)
            self._rate = rate

    def _tell_failure(self, event: str, number: int, error: BaseException, **values: Any) -> None:
        """An error of a DCP save is an exception of the framework with those of the ranks."""
        causes = getattr(error, "failures", None) or {"": (error, traceback.extract_tb(error.__traceback__))}
        self.tell(event, n=number, errors=[
            {"rank": str(rank), "type": type(e).__name__, "ours": isinstance(e, holdfast.Error), "apart": megatron.is_apart(stack),
             "code": getattr(e, "code", ""), "errno": getattr(e, "errno", 0), "message": str(e)[:600]}
            for rank, (e, stack) in causes.items()
        ], **values)  # fmt: skip

    def _wait(self, _: dict[str, Any]) -> None:
        end = time.monotonic() + TIME_OUTCOME_MAX
        for ended in self.outcomes:
            if not ended.wait(max(0.0, end - time.monotonic())):
                self.tell_hang()
                break
        self.outcomes.clear()

    def tell_hang(self) -> None:
        faulthandler.dump_traceback(sys.stderr)
        self.tell("hang", what=f"a save has not ended after {TIME_OUTCOME_MAX:g} s")

    def _load(self, action: dict[str, Any]) -> None:
        """A rollback: an older checkpoint is loaded, and the run goes on from it."""
        try:
            complete = readers.complete(self.directory, self.format)
        except FileNotFoundError:
            return
        except holdfast.Error as error:
            if error.code != "NOT_FOUND":
                self._tell_failure("unreadable", 0, error)
            return
        if not complete:
            return
        chosen = complete[max(0, len(complete) - 1 - action["back"])]
        path = chosen["path"]
        expected = readers.Expected(self.round)
        reader = readers.of_trainer(self.format, self.round["door"])
        try:
            for save, different in reader(path, expected):
                self.tell("loaded", n=save, path=path, different=different)
        except BaseException as error:
            if self._is_there(chosen):
                self._tell_failure("unreadable", 0, error, path=path)

    def _is_there(self, chosen: dict[str, Any]) -> bool:
        """The other trainer may have removed or replaced it."""
        try:
            return chosen in readers.complete(self.directory, self.format)
        except holdfast.Error:
            return True

    def _move(self, action: dict[str, Any]) -> None:
        """Renames the directory, with `beside` while saves are written there, and makes another one."""
        if not action.get("beside"):
            self._wait({})
            with contextlib.suppress(holdfast.Error):
                holdfast.flush(TIME_OUTCOME_MAX)
        if not os.path.isdir(self.directory):
            return
        while os.path.exists(to := f"{self.directory}.moved-{self._moves}"):
            self._moves += 1
        self.tell("moving", to=to)  # before: this process may be killed behind the rename
        os.rename(self.directory, to)
        self._make_directory()

    def _make_directory(self) -> None:
        """Makes the directory of the checkpoints, durably: also where another rank has just made it."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory)
        with contextlib.suppress(OSError):  # of a bad disk
            sync_directory(os.path.dirname(self.directory))

    def _recover(self, _: dict[str, Any]) -> None:
        try:
            if os.path.isdir(self.directory):
                holdfast.recover(self.directory, wait_for_orphans=0.2)
        except holdfast.Error as error:
            self._tell_failure("unreadable", 0, error)

    # ---- Events.

    @contextlib.contextmanager
    def _limits(self, event: dict[str, Any] | None) -> Any:
        """Resource limits around a call; the worker that it starts has them, too."""
        kind = event["kind"] if event else ""
        if event is None or kind not in schedule.LIMITS or event.get("in_flight"):
            yield
            return
        with limited(kind, event.get("bytes", 0), [0, *children()] if kind == "limit-size" else [0]):
            self.tell("fired", kind=kind, phase="call")
            yield
            if kind != "limit-files":
                time.sleep(0.05)  # the worker starts

    def _begin_event(self, number: int, event: dict[str, Any]) -> None:
        kind, in_flight = event["kind"], event.get("in_flight", False)
        if kind in schedule.CHANGES and not in_flight:
            self._memory.change_next(number, kind, event["seconds"])
        elif kind == "lose-copy" and self._device:
            self._device.lose_next(lambda: self.tell("fired", n=number, kind=kind, phase="call"))
        elif in_flight or kind not in (*schedule.LIMITS, "step", "lose-copy"):
            known = handle.in_flight()
            thread = threading.Thread(target=self._hit, args=(number, event, known, children()), daemon=True)
            self.hits.append(thread)
            thread.start()

    def _hit(self, number: int, event: dict[str, Any], known: list[Any], older: dict[int, int]) -> None:
        """The event's own thread: waits for its moment."""
        if event["kind"] == "kill-in-call":
            time.sleep(event["seconds"] / 10)
            # The save of the call has no handle yet: in flight are those before.
            before = {save.progress()["phase"] for save in known if isinstance(save, handle.Save)}
            self._strike(number, event, min(before - {*_ENDED, "queued"}, default="call"), None, None)
            return
        end = time.monotonic() + TIME_OUTCOME_MAX
        while time.monotonic() < end:
            for save in handle.in_flight():
                if save in known or not isinstance(save, handle.Save):
                    continue
                try:
                    now = save.progress()
                except holdfast.Error:
                    continue
                if self._is_moment(event, now):
                    self._strike(number, event, now["phase"], save, older)
                    return
                if now["phase"] in _ENDED:
                    return
            if number in self.over:
                return
            time.sleep(0.0005)

    def _is_moment(self, event: dict[str, Any], now: dict[str, Any]) -> bool:
        if event["phase"] == "commit":
            return now["phase"] in _COMMIT
        if event["phase"] == "later":
            return now["phase"] == "writing" and now["bytes_written"] > 0
        written = now["bytes_written"] / max(1, now["bytes_total"])
        return now["phase"] == "writing" and written >= event["share"] or now["phase"] in _COMMIT

    def worker(self, older: dict[int, int] | None) -> int | None:
        """The worker process: the youngest child, one that was there before where it is kept."""
        with self._starting:
            now = children()
        kept = now if self.round["launcher"] == "persistent" else {}
        mine = {p: t for p, t in now.items() if p not in (older or {})} or kept
        return max(mine, key=lambda p: mine[p]) if mine else None

    def _strike(self, number: int, event: dict[str, Any], phase: str, save: Any, older: Any) -> None:
        kind, seconds = event["kind"], event["seconds"]
        if event["phase"] == "later":
            time.sleep(seconds)
            with contextlib.suppress(holdfast.Error):
                phase = save.progress()["phase"] if save is not None else phase
        if kind in schedule.CHANGES:
            self._memory.change(number, kind, event.get("place", 0.0), seconds, phase)
            return
        if kind in schedule.LIMITS:
            self.tell("fired", n=number, kind=kind, phase=phase)
            with limited(kind, event.get("bytes", 0), [0, *children()]):
                time.sleep(seconds)
            return
        pid = self.worker(older) if kind in schedule.OF_WORKERS else None
        if kind in schedule.OF_WORKERS and pid is None and kind != "kill-both":
            return  # a worker in a thread
        with contextlib.suppress(ProcessLookupError, holdfast.Error):
            if pid is not None and kind in schedule.OF_WORKERS:
                os.kill(pid, signal.SIGSTOP)
                phase = save.progress()["phase"]  # what is said now was so when it stopped
                if kind in sealed_memory.DEAD:
                    self._memory.hold(number, pid)
            self.tell("fired", n=number, kind=kind, phase=phase, pid=pid)
            if kind in ("stop-worker", "hang-worker"):
                time.sleep(TIME_HUNG * 3 if kind == "hang-worker" else seconds)
            if kind == "terminate-worker":
                send(pid, signal.SIGTERM)
            if kind in ("kill-worker", "kill-both"):
                send(pid, signal.SIGKILL)
            if kind == "oom-worker" and pid is not None and not memory_groups.kill(pid, self.directory):
                self.tell("missed", kind=kind)
            self.strike_trainer(kind, seconds)
            if kind == "cancel":
                save.cancel()
            if kind == "fork":
                with self._starting:
                    self._fork(save)
            if pid is not None:
                os.kill(pid, signal.SIGCONT)

    def strike_trainer(self, kind: str, seconds: float) -> None:
        """What an event does to this process; nothing for the events of others."""
        if kind in ("kill-trainer", "kill-both", "kill-in-call"):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "oom-trainer":
            memory_groups.kill(os.getpid(), self.directory)
            self.tell("missed", kind=kind)  # by a process that lives
        if kind == "terminate-trainer":
            os.kill(os.getpid(), signal.SIGTERM)
        if kind == "exit-trainer":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        if kind == "stop-trainer":
            self.tell("stopping", seconds=seconds)
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "program":
            with self._starting:
                subprocess.run(["true"], check=False)

    def _fork(self, save: Any) -> None:
        """A foreign fork: the child uses what it has of the parent's, and ends."""
        pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                for use in (save.progress, save.cancel):
                    try:
                        use()
                    except holdfast.Error as error:
                        status = 0 if error.code == "FAILED_PRECONDITION" else 2
                holdfast.staging()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != 0:
            self.tell("wrong", what=f"a forked child could use the parent's save (status {status})")


class Exiting(SystemExit): ...


def _exit(*_: Any) -> None:
    raise Exiting(0)


def prepare() -> None:
    """What holds for every process that saves or reads in a campaign."""
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR2, sys.stderr)
    signal.signal(signal.SIGUSR1, _exit)
    warnings.simplefilter("ignore")
    for name in ("holdfast", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)


class Task(NamedTuple):
    """One life of a trainer.

    Attributes:
        round, life, job: which life of what.
        directory: of the checkpoints.
        scratch: for logs.
        second: a mount that the process sees in place of that of `directory`; "" for none.
    """

    round: dict[str, Any]
    life: int
    job: int
    directory: str
    scratch: str
    second: str = ""


def serve(kind: type[Trainer], rank: int, ranks: int, store: str, tasks: Connection, out: Connection, plant: str,
          channel: socket.socket | None) -> None:  # fmt: skip
    """The body of a trainer's process: it runs lives until there are no more, or until one ends it.

    Args:
        kind: its class.
        rank, ranks: of the job.
        store: of the process group: a file, or "PORT/NAME" of a server; "" where there is no group.
        tasks: gives each `Task`.
        out: where it tells.
        plant: "MODULE:FUNCTION", a deliberate mistake that is made first: for tests of this program.
        channel: of `injection.install`, where the driver counts system calls.
    """
    prepare()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    if plant:
        module, _, function = plant.partition(":")
        getattr(importlib.import_module(module), function)()
    status = 1
    try:
        while True:
            task = tasks.recv()
            log = os.open(os.path.join(task.scratch, f"trainer-{task.job}-{rank}.log"),
                          os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # fmt: skip
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            trainer = kind(rank, task.round, task.life, task.job, task.directory, out.fileno())
            if task.second:
                with trainer.telling("unable"):
                    see(task.second, os.path.dirname(task.directory))
            if store:
                with trainer.telling("not joined"):
                    join(store, rank, ranks, TIME_OUTCOME_MAX)
                store = ""
            with trainer.telling("unable"):
                if forbidden := task.round["forbidden"]:
                    injection.forbid(forbidden)
                if channel is not None:
                    injection.install(channel)
                    trainer.is_injected = True
            trainer.live()
    except (EOFError, Exiting):
        status = 0  # no more lives, or an exit of an event
    except BaseException:
        traceback.print_exc()  # to its log
    finally:
        out.close()
        os._exit(status)  # the process group of ranks that are gone would wait for them
