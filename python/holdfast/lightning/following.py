"""A save of two parts: what the runtime writes, and what is done in this process when that is durable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast import _completion, _runtime, handle
from holdfast.errors import Error


class Following:
    """A handle for both parts. They end in a thread of their own, for which the exit waits.

    Attributes:
        path: where the checkpoint will stand.
        durable: a future of both.
        staged: that of the first.

    Args:
        path: as above.
        staged: as above.
        first: blocks until the first part is durable.
        second: does the second part.
        clean: called at the end, whatever it is.
        runtime: that the first part was begun with.
    """

    refused = False

    def __init__(self, path: str, staged: Any, first: Callable[[], Any], second: Callable[[], None],
                 clean: Callable[[], None], runtime: _runtime.Runtime | None) -> None:  # fmt: skip
        self.path = path
        self.staged = staged
        self.durable = _completion.SeenFuture()
        self.runtime = runtime
        self._first, self._second, self._clean = first, second, clean
        self._completion = _completion.Completion(self._run, "holdfast-following")
        handle.begun(self)
        self._completion.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._first()
            self._second()
        except Error as failed:
            error = failed
        except BaseException as failed:
            error = Error("UNAVAILABLE", f"save {self.path}: {failed!r}")
            error.__cause__ = failed
        finally:
            try:
                self._clean()
            except Exception:
                _completion.log_failure("clean up behind the save of %s", self.path)
            _completion.end(self.durable, None, error)
            handle.ended(self, failed=error is not None)

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until both parts are done; raises what has failed."""
        return self.durable.of_save(self.path, timeout)

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._completion.join()

    def hold_back_training(self) -> None:
        """Nothing: the first part does it by itself."""
