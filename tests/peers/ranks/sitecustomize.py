"""Loaded by every rank of `run_framework_tests.py`, whose tests ask for a GPU.

It replaces the GPU by the CPU, supplies `typing.override` to Python 3.11, and installs Holdfast, whose saves are proved when
they are committed.
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

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "frameworks/no_gpu"))


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


def _replace_gpu():
    import cpu_for_gpu
    import torch.distributed as dist

    cpu_for_gpu.replace_gpu()
    dist.new_group = _forgotten_with_its_model(dist.new_group)


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
        _replace_gpu()
        if os.environ.get("HOLDFAST_PEER_STOCK") != "1":
            _install()
        return importlib.util.find_spec(name)


sys.meta_path.insert(0, _Finder())
