"""`TorchAsyncCheckpoint`: nvidia-resiliency-ext's asynchronous ``torch.save``, by `holdfast.save_file`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from holdfast.errors import Error, add_note
from holdfast.files import save_file
from holdfast.handle import Save


class TorchAsyncCheckpoint:
    """Saves objects as ``torch.save`` does, without waiting for the disk.

    A call returns when the object is captured. Nothing is forked or sent to another process.
    """

    def __init__(self, persistent_queue: bool = True) -> None:
        """Saves of this rank.

        Args:
            persistent_queue: how the stock class works; accepted and not used.
        """
        self._saves: list[Save] = []

    @staticmethod
    def save(state_dict: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Saves an object, and returns when its file is durable.

        Raises:
            Error: as `holdfast.save_file`.
        """
        save_file(state_dict, path, wait=True, pickle_protocol=_protocol(path, *args, **kwargs))

    def async_save(self, state_dict: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Captures an object and begins to save it.

        Args:
            state_dict: whatever ``torch.save`` takes.
            path: of the file.
            *args, **kwargs: further arguments of ``torch.save``.

        Raises:
            Error: as `holdfast.save_file`. `finalize_async_save` raises what fails later.
        """
        self._saves.append(save_file(state_dict, path, pickle_protocol=_protocol(path, *args, **kwargs)))

    def finalize_async_save(self, blocking: bool = False, no_dist: bool = True, terminate: bool = False) -> None:
        """Finalizes the saves that have ended.

        Args:
            blocking: wait for all.
            no_dist: of this rank; else all ranks call it and wait for each other.
            terminate: accepted and not needed: nothing is kept open.

        Raises:
            Error: of the first save that has failed, with the others in its notes. Without `no_dist`
                all ranks raise; DATA_LOSS on those whose own saves are durable.
        """
        failures = []
        under_way = []
        for save in self._saves:
            if not blocking and not save.durable.done():
                under_way.append(save)
            elif (failure := save.durable.exception()) is not None:
                failures.append(failure)
        self._saves = under_way
        if blocking and not no_dist and dist.is_available() and dist.is_initialized():
            failures += _of_other_ranks(failures)
        for other in failures[1:]:
            add_note(failures[0], f"and: {other}")
        if failures:
            raise failures[0]

    def close(self, abort: bool = False) -> None:
        """Waits for all saves of this rank, or cancels them.

        Raises:
            Error: as `finalize_async_save`.
        """
        if abort:
            saves, self._saves = self._saves, []
            for save in saves:
                save.durable.seen = True
                save.cancel()
        self.finalize_async_save(blocking=True)


def _of_other_ranks(mine: list[BaseException]) -> list[BaseException]:
    """The failures of the other ranks; all ranks call it."""
    told: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, [str(failure) for failure in mine])
    here = dist.get_rank()
    return [
        Error("DATA_LOSS", f"rank {rank}: {text}") for rank, texts in enumerate(told) if rank != here for text in texts
    ]


def _protocol(path: Any, pickle_module: Any = None, pickle_protocol: int = 2, *_: Any, **__: Any) -> int:
    """The protocol of the arguments that follow the file in ``torch.save``.

    Raises:
        Error: INVALID_ARGUMENT, another pickle module.
    """
    if pickle_module is not None and pickle_module.__name__ != "pickle":
        raise Error(
            "INVALID_ARGUMENT",
            f"save {path}: pickle_module={pickle_module.__name__} is not used here; leave it out, or call torch.save",
        )
    return pickle_protocol
