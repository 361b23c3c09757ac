"""Deliberate mistakes for the tests of integrity-fuzz: each breaks a promise in a trainer of the campaign."""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import holdfast
import holdfast.dcp
from holdfast import _durable, handle
from holdfast.dcp import writer
from holdfast.integrity import injection, jobs, memory_groups, sealed_memory, slow_device, trainer

_kept: list[Any] = []
_calls = itertools.count(1)


def _wrap(change: Callable[..., Any]) -> None:
    """Puts `change(save, state, path)` in place of every front door's save."""
    trainer.TIME_SETTLE_MAX = 0.3  # what is planted never goes
    real, real_file, real_dcp = holdfast.save_async, holdfast.save_file, holdfast.dcp.async_save
    of_object = holdfast.Checkpointer.save_async

    def plain(state: Any, path: Any, **options: Any) -> Any:
        return change(lambda s, p: real(s, p, **options), state, str(path))

    def file(state: Any, path: Any, **options: Any) -> Any:
        return change(lambda s, p: real_file(s, p, **options), state, str(path))

    def dcp(state: Any, *, checkpoint_id: Any = None, **options: Any) -> Any:
        if checkpoint_id is None:
            return real_dcp(state, **options)
        return change(lambda s, p: real_dcp(s, checkpoint_id=p, **options), state, str(checkpoint_id))

    def of_checkpointer(self: Any, state: Any, step: int, *, name: str, **options: Any) -> Any:
        path = os.path.join(self.directory, name)
        return change(lambda s, p: of_object(self, s, step, name=os.path.basename(p), **options), state, path)

    holdfast.save_async = plain  # type: ignore[assignment]
    holdfast.save_file = file  # type: ignore[assignment]
    holdfast.dcp.async_save = dcp  # type: ignore[assignment]
    holdfast.Checkpointer.save_async = of_checkpointer  # type: ignore[method-assign]


def _future(save: Any) -> Any:
    return getattr(save, "durable", save)


def _ended(value: Any = None) -> Future:
    made: Future = Future()
    made.set_result(value)
    return made


def captures_late() -> None:
    """The state is read after the call has returned. Saves keep their order: one that is overtaken fails."""
    one_by_one = ThreadPoolExecutor(1)

    def change(save: Any, state: Any, path: str) -> Any:
        def run() -> Any:
            time.sleep(0.1)
            return _future(save(state, path)).result()

        return SimpleNamespace(durable=one_by_one.submit(run), path=path, skipped=False)

    _wrap(change)


def captures_one_tensor_late() -> None:
    """The largest tensor is copied a moment after the call: a torn checkpoint."""

    def change(save: Any, state: Any, path: str) -> Any:
        made = save(state, path)
        tensors = [t for t in (state.get("own") or state).values() if isinstance(t, torch.Tensor) and t.numel()]
        if tensors:
            tensors[0].view(torch.uint8).bitwise_not_()
            again = save(state, path + "-torn")
            _future(made).add_done_callback(lambda _: None)
            _future(again).exception(60)
            _future(made).exception(60)
            if os.path.isdir(path) and os.path.isdir(path + "-torn"):
                shutil.rmtree(path)
                os.rename(path + "-torn", path)
        return made

    _wrap(change)


def durable_too_early() -> None:
    """A save is told durable when the call returns."""

    def change(save: Any, state: Any, path: str) -> Any:
        made = save(state, path)
        _kept.append(made)
        for one in handle.in_flight():
            if isinstance(one, handle.Save):
                one.cancel()
        _future(made).add_done_callback(lambda f: f.exception())
        return SimpleNamespace(durable=_ended(), path=path, skipped=False)

    _wrap(change)


def syncs_nothing() -> None:
    """fsync says that it is done, and does nothing: in the trainer and in its workers."""
    injection.forbid({"fsync": ""})


def failures_are_swallowed() -> None:
    """A save that fails is told durable."""

    def change(save: Any, state: Any, path: str) -> Any:
        told: Future = Future()
        _future(save(state, path)).add_done_callback(lambda f: (f.exception(), told.set_result(None)))
        return SimpleNamespace(durable=told, path=path, skipped=False)

    _wrap(change)


def removes_one_too_many() -> None:
    """The checkpoint before a durable one is removed, whatever is to be kept."""

    def change(save: Any, state: Any, path: str) -> Any:
        made = save(state, path)
        before = _kept[-1] if _kept else ""
        _kept.append(path)

        def done(future: Any) -> None:
            if future.exception() is None and before and before != path:
                shutil.rmtree(before, ignore_errors=True)

        _future(made).add_done_callback(done)
        return made

    _wrap(change)


def removes_before_the_next_is_durable() -> None:
    """Retention removes the checkpoint before when the next save is called."""

    def change(save: Any, state: Any, path: str) -> Any:
        made = save(state, path)
        if _kept and _kept[-1] != path:
            shutil.rmtree(_kept[-1], ignore_errors=True)
        _kept.append(path)
        return made

    _wrap(change)


def older_save_replaces_newer() -> None:
    """Every second save of a name begins first and commits last."""

    def change(save: Any, state: Any, path: str) -> Any:
        if next(_calls) % 2:
            told: Future = Future()
            copy = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in _copied(state).items()}
            _kept.append((save, copy, path))
            told.set_result(None)
            return SimpleNamespace(durable=told, path=path, skipped=False)
        made = save(state, path)
        _future(made).exception(60)
        while _kept:
            older, copy, place = _kept.pop()
            _future(older(copy, place)).exception(60)
        return made

    _wrap(change)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def saves_into_a_moved_directory() -> None:
    """The directory is opened once, and kept when it is renamed and made anew."""
    first: list[int] = []

    def change(save: Any, state: Any, path: str) -> Any:
        directory, name = os.path.split(path)
        if not first:
            os.makedirs(directory, exist_ok=True)
            first.append(os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC))
        made = save(state, os.path.join(os.path.realpath(f"/proc/self/fd/{first[0]}"), name))
        return SimpleNamespace(durable=_future(made), path=path, skipped=False)

    _wrap(change)


def saves_a_tensor_too_many() -> None:
    """A checkpoint has a tensor that the state has not."""
    _wrap(lambda save, state, path: save({**state, "more": torch.ones(3)}, path))


def leaves_a_new_directory_unsynced() -> None:
    """The directory of the checkpoints is made, and its parent, the mount of the round, is not synced."""
    real = _durable.begin_directory

    def begin(path: str) -> list[str]:
        return [above for above in real(path) if os.path.basename(above) != "disk"]

    _durable.begin_directory = writer.begin_directory = begin


def leaks_a_descriptor() -> None:
    """Each save leaves a descriptor open."""

    def change(save: Any, state: Any, path: str) -> Any:
        _kept.append(os.open("/dev/null", os.O_RDONLY))
        return save(state, path)

    _wrap(change)


def leaks_a_process() -> None:
    """Each save leaves a process."""

    def change(save: Any, state: Any, path: str) -> Any:
        _kept.append(subprocess.Popen(["sleep", "5"], start_new_session=True))
        return save(state, path)

    _wrap(change)


def leaves_a_file() -> None:
    """Each save leaves a temporary file beside the checkpoints."""

    def change(save: Any, state: Any, path: str) -> Any:
        made = save(state, path)
        Path(path + ".tmp").write_bytes(b"left")
        return made

    _wrap(change)


def never_ends() -> None:
    """The end of a save is never told."""
    trainer.TIME_OUTCOME_MAX = 3.0

    def change(save: Any, state: Any, path: str) -> Any:
        _kept.append(save(state, path))
        return SimpleNamespace(durable=Future(), path=path, skipped=False)

    _wrap(change)


def raises_an_error_of_the_system() -> None:
    """A save fails with a raw OSError."""

    def change(save: Any, state: Any, path: str) -> Any:
        raise OSError(28, "No space left on device", path)

    _wrap(change)


def fails_without_a_reason() -> None:
    """A save fails, and nothing has happened."""

    def change(save: Any, state: Any, path: str) -> Any:
        raise holdfast.Error("ABORTED", f"save {path}: the worker has failed")

    _wrap(change)


def stays_broken_after_a_worker() -> None:
    """Once a save has failed, each later one of its process fails."""
    failed: list[bool] = []

    def change(save: Any, state: Any, path: str) -> Any:
        if failed:
            raise holdfast.Error("ABORTED", f"save {path}: its worker was killed by signal 9 (KILL)")
        try:
            made = save(state, path)
        except holdfast.Error:
            failed.append(True)
            raise
        _future(made).add_done_callback(lambda f: failed.extend([True] * bool(f.exception())))
        return made

    _wrap(change)


def stays_broken_after_a_trainer() -> None:
    """The first save of a process over what another one has left fails."""

    def change(save: Any, state: Any, path: str) -> Any:
        if next(_calls) == 1 and os.path.exists(path):
            raise holdfast.Error("ABORTED", f"save {path}: a later save has overtaken it")
        return save(state, path)

    _wrap(change)


def aborts_what_replaces() -> None:
    """A save fails when an earlier one has its name."""

    def change(save: Any, state: Any, path: str) -> Any:
        if path in _kept:
            raise holdfast.Error("ABORTED", f"replace {path}: a save that began later was completed in the meantime")
        _kept.append(path)
        return save(state, path)

    _wrap(change)


def skips_with_free_memory() -> None:
    """Every save but the first is skipped."""

    def change(save: Any, state: Any, path: str) -> Any:
        if not _kept:
            _kept.append(path)
            return save(state, path)
        left_out: Future = Future()
        left_out.set_exception(holdfast.Error("UNAVAILABLE", f"save {path}: skipped, because the staging memory is held"))
        return SimpleNamespace(durable=left_out, path=path, skipped=True)

    _wrap(change)


def names_no_object() -> None:
    """The message of a failure does not say what has failed."""

    def change(save: Any, state: Any, path: str) -> Any:
        told: Future = Future()

        def done(future: Any) -> None:
            error = future.exception()
            code = getattr(error, "code", "ABORTED")
            told.set_exception(holdfast.Error(code, "it failed")) if error else told.set_result(None)

        _future(save(state, path)).add_done_callback(done)
        return SimpleNamespace(durable=told, path=path, skipped=False)

    _wrap(change)


def loses_a_copy() -> None:
    """A device loses every fifth copy and says that it is done."""
    real = slow_device.SlowDevice.copy_to_host

    def copy(self: Any, destination: int, source: int, nbytes: int) -> int:
        if next(_calls) % 5 == 0:
            return real(self, destination, destination, nbytes)
        return real(self, destination, source, nbytes)

    slow_device.SlowDevice.copy_to_host = copy  # type: ignore[method-assign]


def takes_a_lost_copy() -> None:
    """A copy that has failed counts as done."""
    real = slow_device.SlowDevice.is_done

    def is_done(self: Any, ticket: int) -> bool:
        try:
            return real(self, ticket)
        except RuntimeError:
            return True

    slow_device.SlowDevice.is_done = is_done  # type: ignore[method-assign]


def copies_after_the_training_goes_on() -> None:
    """A stream that is made to wait for copies does not."""
    slow_device.SlowDevice.make_stream_wait = lambda self, stream: None  # type: ignore[method-assign]
    from holdfast import _late

    _late.CLONE_MAX = 0


def crashes() -> None:
    """The trainer crashes."""
    os.kill(os.getpid(), signal.SIGSEGV)


def ends_without_thread_data() -> None:
    """The trainer's call ends as the C library ends a process for lack of memory. This is no planted bug."""
    _wrap(lambda *_: os._exit(jobs.NO_THREAD_DATA))


def ends_in_its_call() -> None:
    """A save ends the trainer, with the status of success."""
    _wrap(lambda *_: os._exit(0))


def kills_its_trainer() -> None:
    """A save kills the trainer, as one that takes its pid for a worker's."""
    _wrap(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def terminates_its_trainer() -> None:
    """The same with SIGTERM."""
    _wrap(lambda *_: os.kill(os.getpid(), signal.SIGTERM))


def _raises(error: Exception) -> Callable[..., Any]:
    def planted(*_: Any) -> Any:
        raise error

    return planted


def fails_before_its_life() -> None:
    """What is planted is of this program, not of a save: a trainer is never made."""
    trainer.Trainer.__init__ = _raises(RuntimeError("planted"))  # type: ignore[method-assign]


def joins_no_group() -> None:
    """Likewise: a rank has no process group."""
    trainer.join = _raises(RuntimeError("planted"))


def may_forbid_nothing() -> None:
    """A filter of the container refuses a filter of the trainer's own. This is no planted bug."""
    injection.forbid = _raises(PermissionError(1, "planted"))


def makes_no_group() -> None:
    """No memory control group can be made. This is no planted bug."""
    memory_groups.kill = lambda *_: False


def trusts_the_end_of_a_process() -> None:
    """Memory of a save is used again when its worker's process has ended."""
    keep, strike = sealed_memory.SealedMemory.sealed, trainer.Trainer._strike
    sealed: list[tuple[int, int]] = []

    def kept(self: Any, address: int, nbytes: int, *rest: Any) -> None:
        sealed.append((address, nbytes))
        keep(self, address, nbytes, *rest)

    def struck(self: Any, number: int, event: dict[str, Any], phase: str, save: Any, older: Any) -> None:
        worker = os.pidfd_open(self.worker(older))
        strike(self, number, event, phase, save, older)
        select.select([worker], [], [])
        for address, nbytes in sealed:
            ctypes.memset(address, 0xEE, nbytes)
        os.close(worker)

    sealed_memory.SealedMemory.sealed = kept  # type: ignore[method-assign]
    trainer.Trainer._strike = struck  # type: ignore[method-assign]


def trusts_every_lock() -> None:
    """A recovery takes what nobody has locked for what nobody writes, on any file system."""
    real = holdfast.recover

    def recover(directory: Any, **options: Any) -> Any:
        return real(directory, **options, silence_without_locks=0.0, age_without_locks=0.0)

    holdfast.recover = recover  # type: ignore[assignment]
