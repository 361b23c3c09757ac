"""What Lightning does to checkpoints without asking its plugin, brought to it, and what all ranks must know of it.

`ModelCheckpoint` makes links, looks whether files are there, and tells loggers of a file right after
the call; a wrapper around a plugin does not hand on ``teardown``, and some strategies do not call it. The
plugin of rank 0 saves, those of all ranks load.
`install` puts a function in front of each of these. It serves trainers whose plugin is `CheckpointIO`
and calls the framework's own for all others.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, proxy

from holdfast.errors import add_note
from holdfast.lightning import agreement, flavor

logger = logging.getLogger("holdfast.lightning")


# A mock of a trainer has a plugin in every plugin, without end.
_WRAPPERS_MAX = 16


def unwrapped(plugin: Any, kind: type) -> Any:
    """The plugin of class `kind` in `plugin`, under whatever wrappers, or None."""
    for _ in range(_WRAPPERS_MAX):
        if plugin is None or isinstance(plugin, kind):
            return plugin
        plugin = getattr(plugin, "checkpoint_io", None)
    return None


def plugin_of(trainer: Any, kind: type) -> Any:
    """The plugin of class `kind` that a trainer saves with, or None."""
    return unwrapped(getattr(trainer.strategy, "checkpoint_io", None), kind)


def _refuse_threads(trainer: Any) -> None:
    """Refuses the framework's own asynchronous plugin around ours: it would bring saves after removals."""
    if any(kind.__name__ == "AsyncCheckpointIO" for kind in type(trainer.strategy.checkpoint_io).__mro__):
        raise TypeError(
            "holdfast.lightning.CheckpointIO saves asynchronously by itself; pass it without AsyncCheckpointIO"
        )


class _WithoutLoggers:
    """A trainer that shows no loggers."""

    loggers: tuple[Any, ...] = ()

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def install(kind: type) -> None:
    """Puts the functions in front, once, in every flavor of Lightning that was imported."""
    for modules, name, put in (
        (flavor.imported("callbacks.model_checkpoint"), "ModelCheckpoint", _into_callback),
        (flavor.imported("trainer.trainer"), "Trainer", _into_trainer),
        (flavor.imported("trainer.connectors.checkpoint_connector"), "_CheckpointConnector", _into_connector),
        (flavor.imported_fabric("fabric"), "Fabric", _into_fabric),
    ):
        for module in modules:
            stock = getattr(module, name)
            if not hasattr(stock, "_holdfast_hooks"):
                put(stock, kind)
                stock._holdfast_hooks = True


def _into_callback(callback: Any, kind: type) -> None:
    """In front of methods of `ModelCheckpoint`."""
    stock_link, stock_save = callback._link_checkpoint, callback._save_checkpoint
    stock_exists, stock_batch_end = callback.file_exists, callback.on_train_batch_end

    @functools.wraps(stock_link)
    def link(trainer: Any, filepath: Any, linkpath: Any) -> None:
        plugin = plugin_of(trainer, kind)
        if plugin is None:
            return stock_link(trainer, filepath, linkpath)
        if trainer.is_global_zero:
            plugin.link_checkpoint(filepath, linkpath)
        return trainer.strategy.barrier()

    @functools.wraps(stock_save)
    def save(self: Any, trainer: Any, filepath: Any) -> None:
        plugin = plugin_of(trainer, kind)
        if plugin is not None:
            _refuse_threads(trainer)
        if plugin is None or not trainer.loggers:
            return stock_save(self, trainer, filepath)
        stock_save(self, _WithoutLoggers(trainer), filepath)
        if trainer.is_global_zero:
            view, then = _view_of(self), _state_of(self)
            for one in trainer.loggers:
                plugin.tell_when_durable(functools.partial(view.tell, one, then))

    @functools.wraps(stock_exists)
    def exists(self: Any, filepath: Any, trainer: Any) -> bool:
        plugin = plugin_of(trainer, kind)
        if plugin is None:
            return stock_exists(self, filepath, trainer)
        here = trainer.is_global_zero and plugin.exists(filepath, self._fs.exists(filepath))
        return trainer.strategy.reduce_boolean_decision(here, all=False)

    @functools.wraps(stock_batch_end)
    def batch_end(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        plugin = plugin_of(trainer, kind)
        if plugin is not None:
            plugin.deliver()
        return stock_batch_end(self, trainer, *args, **kwargs)

    callback._link_checkpoint = staticmethod(link)
    callback._save_checkpoint = save
    callback.file_exists = exists
    callback.on_train_batch_end = batch_end


class _View:
    """A callback as loggers see it: while they are told of a checkpoint, as it was at that save.

    They keep it, and look at it at the end; it is one object for all saves of a callback.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = proxy(callback)
        self._then: dict[str, Any] = {}

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._callback.__class__

    def __getattr__(self, name: str) -> Any:
        return self._then[name] if name in self._then else getattr(self._callback, name)

    def tell(self, one: Any, then: dict[str, Any]) -> None:
        self._then = then
        try:
            one.after_save_checkpoint(self)
        except ReferenceError:
            logger.debug("a logger was not told of a checkpoint, its callback is gone")
        finally:
            self._then = {}


_views: WeakKeyDictionary[Any, _View] = WeakKeyDictionary()


def _view_of(callback: Any) -> _View:
    if callback not in _views:
        _views[callback] = _View(callback)
    return _views[callback]


def _state_of(callback: Any) -> dict[str, Any]:
    return {k: dict(v) if isinstance(v, dict) else v for k, v in vars(callback).items()}


def _into_trainer(trainer_class: Any, kind: type) -> None:
    """In front of the end of ``fit`` and the like, which an exception leads to as well."""
    stock = trainer_class._teardown

    @functools.wraps(stock)
    def teardown(self: Any) -> None:
        plugin = plugin_of(self, kind)
        if plugin is None:
            return stock(self)
        error: BaseException | None = None
        try:
            error = _error_of(plugin, plugin.wait)
            if not self.interrupted and self.world_size > 1:  # else not all ranks come here
                error = agreement.error_of_ranks(self.strategy, error)
        finally:
            stock(self)
        if error is None:
            return None
        under_way = sys.exc_info()[1]
        if under_way is None or not self.interrupted:
            raise error
        # What has ended the training goes on its way, and says what failed besides.
        logger.error("%s", error)
        add_note(under_way, f"and a checkpoint was not saved: {error}")
        return None

    trainer_class._teardown = teardown


def _into_connector(connector: Any, kind: type) -> None:
    """In front of a trainer's load, which all ranks begin."""
    stock = connector.resume_start

    @functools.wraps(stock)
    def resume_start(self: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        plugin = plugin_of(self.trainer, kind)
        if plugin is not None and checkpoint_path and self.trainer.world_size > 1:
            _wait_on_all(self.trainer.strategy, plugin, checkpoint_path)
        return stock(self, checkpoint_path, *args, **kwargs)

    connector.resume_start = resume_start


def _into_fabric(fabric: Any, kind: type) -> None:
    """In front of Fabric's load, which all ranks begin."""
    stock = fabric.load

    @functools.wraps(stock)
    def load(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        # Not `checkpoint_io`, which some strategies refuse.
        plugin = unwrapped(getattr(self.strategy, "_checkpoint_io", None), kind)
        if plugin is not None and self.world_size > 1:
            _wait_on_all(self.strategy, plugin, path)
        return stock(self, path, *args, **kwargs)

    fabric.load = load


def _wait_on_all(strategy: Any, plugin: Any, path: Any) -> None:
    """Waits on all ranks for all saves: one that fails later would fail the load of rank 0 alone.

    Raises:
        Error: on all ranks, of a save of rank 0 that has failed.
    """

    def wait() -> None:
        plugin.order.wait_for_saves()
        plugin.wait_for(path)

    error = agreement.error_of_ranks(strategy, _error_of(plugin, wait))
    if error is not None:
        raise error


def _error_of(plugin: Any, wait: Callable[[], object]) -> BaseException | None:
    """What a wait for saves raises, also of a logger, or what has failed before: the other ranks wait for the answer."""
    try:
        wait()
        error: BaseException | None = plugin.order.take_error()
    except Exception as failed:
        return failed
    return error
