"""Saves of single files that one request stands for."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from holdfast.errors import Error
from holdfast.files import remove_file
from holdfast.handle import Save
from holdfast.megatron.ticket import Mark, give_up, register, wait_until_written


class FileSaves:
    """The files of this rank in one request, under way since they were begun.

    A request that is dropped before it is finalized is cancelled, with its saves.

    Attributes:
        path: what is saved, for messages.
    """

    def __init__(self, path: str, keep: bool = False) -> None:
        """No file yet.

        Args:
            path: for messages.
            keep: the files replace older ones that count: `cancel` removes none that is durable.
        """
        self.path = path
        self._keep = keep
        self._mark = Mark()
        self._saves: list[Save] = []
        self._refusal: Exception | None = None
        self._hold = weakref.finalize(self, give_up, self._saves)
        self._hold.atexit = False
        register(self._mark.ticket, self)

    def begin(self, start: Callable[[], Save | None]) -> None:
        """Begins the save of one file. What `start` raises is the failure of all."""
        if self._refusal is not None:
            return
        try:
            save = start()
        except Exception as error:
            error.__traceback__ = None  # its frames have the state
            self._refusal = error
            return
        if save is not None:
            self._saves.append(save)

    def request(self, of: Callable[..., Any], finalize_fns: list[Callable[[], None]]) -> Any:
        """The request that stands for the saves that were begun; no further one follows.

        Args:
            of: class of requests.
            finalize_fns: of the request. A reference to this object among them keeps it.
        """
        mark, saves = self._mark, self._saves

        def note(_: Any) -> None:
            if all(save.durable.done() for save in saves):
                mark.set()

        for save in saves:
            save.durable.add_done_callback(note)
        note(None)
        return of(wait_until_written, [mark.ticket], finalize_fns, async_fn_kwargs={})

    @property
    def has_ended(self) -> bool:
        """Whether all saves have ended, well or not."""
        return all(save.durable.done() for save in self._saves)

    def wait(self) -> BaseException | None:
        """Blocks until all saves have ended. Returns the first failure."""
        self._hold.detach()
        failures = [save.durable.exception() for save in self._saves]
        return self._refusal or next((failure for failure in failures if failure is not None), None)

    def outcome(self) -> None:
        """None: the finalize function of the request compares the ranks, and raises on all of them."""
        return None

    def sync_added(self) -> None:
        """Nothing: nobody adds to the files."""

    def cancel(self) -> None:
        """Gives the saves up and removes their files, unless they are kept."""
        self._hold.detach()
        for save in self._saves:
            save.durable.seen = True
            with contextlib.suppress(Error):
                save.cancel()
            if not self._keep and save.durable.exception() is None:  # it was durable before
                with contextlib.suppress(Error):
                    remove_file(save.path)
