"""Loaded by every rank of `run_framework_tests.py`: what Megatron's tests ask of a GPU, they get of the CPU.

It also supplies what Python 3.11 lacks, and installs Holdfast, whose saves are proved when they are committed.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import os
import sys
import typing


class _Stream(contextlib.AbstractContextManager):
    """A stream or an event: everything has happened when it is asked for."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def __exit__(self, *_):
        return None

    def query(self):
        return True

    def record_event(self, *_):
        return self

    def nothing(self, *_):
        pass

    wait_stream = wait_event = synchronize = record = nothing


def _without_gpu():
    import torch
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode

    cuda, cpu = torch.cuda, torch.device("cpu")
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.current_device = lambda: cpu
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *_, **__: 0
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.Stream = cuda.Event = cuda.stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    names = "synchronize set_device empty_cache reset_peak_memory_stats manual_seed manual_seed_all set_rng_state"
    for name in [*names.split(), "_lazy_call", "_lazy_init"]:
        setattr(cuda, name, lambda *_, **__: None)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self

    class OnTheCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = cpu
            if function is torch.Tensor.to:
                args = tuple(cpu if str(value).startswith("cuda") else value for value in args)
            return function(*args, **kwargs)

    OnTheCpu().__enter__()
    for optimizer in (torch.optim.Adam, torch.optim.AdamW):
        optimizer.__init__ = _with_a_rate(optimizer.__init__)
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _on_gloo(getattr(dist, name)))


def _with_a_rate(init):
    """Of fused optimizers the rate has a default, and Megatron hands on none."""

    @functools.wraps(init)
    def with_a_rate(self, params, *args, **kwargs):
        if kwargs.get("lr", 0.0) is None:
            kwargs["lr"] = 1e-3
        init(self, params, *args, **kwargs)

    return with_a_rate


def _on_gloo(make):
    def made(*args, **kwargs):
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        kwargs.pop("pg_options", None)
        return make(*args, **kwargs)

    return made


def _install():
    import holdfast.dcp
    import holdfast.megatron
    from holdfast.megatron.writer import FileSystemWriterAsync

    if "HOLDFAST_PEERS_JOURNAL" in os.environ:
        from journal import note

        finish = FileSystemWriterAsync.finish

        @functools.wraps(finish)
        def proved(self, *args):
            finish(self, *args)
            note("save", path=str(self.path), verdict=holdfast.dcp.verify(self.path)["verdict"])

        FileSystemWriterAsync.finish = proved
    holdfast.megatron.install()


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the first import that means a rank: the launcher needs nothing of this."""

    def find_spec(self, name, path, target=None):
        if name not in ("pytest", "megatron"):
            return None
        sys.meta_path.remove(self)
        if not hasattr(typing, "override"):
            import typing_extensions

            typing.override = typing_extensions.override
        _without_gpu()
        if os.environ.get("HOLDFAST_PEER_STOCK") != "1":
            _install()
        return importlib.util.find_spec(name)


sys.meta_path.insert(0, _Finder())
