"""Loaded by every rank of `run_framework_tests.py`: what Megatron's tests ask of a GPU, they get of the CPU.

It also supplies what Python 3.11 lacks, and installs Holdfast, whose saves are proved when they are committed.
"""

import contextlib
import filecmp
import functools
import importlib.abc
import importlib.util
import os
import pathlib
import sys
import typing
import zipfile


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
    torch.Tensor.type = _of_a_gpu(torch.Tensor.type)

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
        optimizer.state_dict = _with_steps(optimizer.state_dict)
    dist.init_process_group = _on_gloo(dist.init_process_group)
    dist.new_group = _forgotten_with_its_model(_on_gloo(dist.new_group))


def _of_a_gpu(kind):
    """The distributed optimizer takes tensors of a GPU alone, and knows them by the name of their type."""

    @functools.wraps(kind)
    def named(self, *args, **kwargs):
        name = kind(self, *args, **kwargs)
        return name if args or kwargs else "torch.cuda." + name.rpartition(".")[2]

    return named


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


def _with_steps(state_dict):
    """Megatron makes the state as that of Apex's Adam, which has no step, and reads it as that of PyTorch's."""

    @functools.wraps(state_dict)
    def with_steps(self):
        import torch

        state = state_dict(self)
        for of_parameter in state["state"].values():
            of_parameter.setdefault("step", torch.tensor(0.0))
        return state

    return with_steps


def _forgotten_with_its_model(new_group):
    """Megatron's groups end with the model that they are made for.

    Megatron drops them, and PyTorch keeps them: after twenty tests a rank has a thousand threads of gloo, each of which wakes a
    hundred times a second.
    """
    made = []

    def destroying(destroy):
        @functools.wraps(destroy)
        def destroyed(*args, **kwargs):
            import torch.distributed as dist

            destroy(*args, **kwargs)
            while made:
                with contextlib.suppress(ValueError):  # some it has destroyed itself
                    dist.destroy_process_group(made.pop())

        destroyed.groups_end_here = True
        return destroyed

    def made_for_a_model(*args, **kwargs):
        import torch.distributed as dist

        group = new_group(*args, **kwargs)
        caller = sys._getframe(1).f_globals
        if caller["__name__"] == "megatron.core.parallel_state" and group is not dist.GroupMember.NON_GROUP_MEMBER:
            made.append(group)
            if not hasattr(caller["destroy_model_parallel"], "groups_end_here"):
                caller["destroy_model_parallel"] = destroying(caller["destroy_model_parallel"])
        return group

    return made_for_a_model


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
        if "HOLDFAST_PEER_LOCAL" in os.environ:
            _prove_files(note)
    filecmp.cmp = _but_for_the_id(filecmp.cmp)
    pathlib.Path.rglob = _without_manifests(pathlib.Path.rglob)
    holdfast.megatron.install()


def _prove_files(note):
    """Notes each file of a local checkpoint when it is durable."""
    import holdfast
    from holdfast.nvrx import local_manager

    save_file = local_manager.save_file

    @functools.wraps(save_file)
    def proved(state, path, **options):
        def ended(durable):
            failed = durable.exception()
            note("save", path=str(path), verdict=f"failed: {failed}" if failed else holdfast.verify(path)["verdict"])

        begun = save_file(state, path, **options)
        begun.durable.add_done_callback(ended)
        return begun

    local_manager.save_file = proved


def _but_for_the_id(cmp):
    """Files of the same state are the same but for the id of their save, which is a record of its own."""

    @functools.wraps(cmp)
    def compared(one, other, shallow=True):
        return cmp(one, other, shallow) or _records(one) == _records(other)

    return compared


def _records(path):
    with zipfile.ZipFile(path) as archive:
        return [(name, archive.read(name)) for name in archive.namelist() if not name.endswith("serialization_id")]


def _without_manifests(rglob):
    @functools.wraps(rglob)
    def listed(self, pattern):
        return (path for path in rglob(self, pattern) if ".holdfast-" not in path.name)

    return listed


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
