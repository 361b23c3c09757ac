"""What the commands read: Holdfast and DCP checkpoints, safetensors files and torch.save zips.

Needs PyTorch for DCP checkpoints and torch.save zips, and to make a state of any source.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from holdfast import _names, _native, _regular, directories, snapshots
from holdfast.cli import description, places
from holdfast.errors import Error, counted, of_damage, of_system

_OWN = "holdfast:"
_FILE = _OWN + "file:"
# Of layout="hf": its only file or first shard, where the other layout counts ranks from 0; and the index.
_HF_FILES = ("model.safetensors", "model-00001-of-")
_HF_INDEX = _FILE + "model.safetensors.index.json"

TWICE = "two entries have this name, as of the keys a.b and a, b; rename one in the state"

# Where large states are kept while they are compared or converted.
scratch_directory = tempfile.gettempdir()


class Tensor(NamedTuple):
    """A stored tensor.

    Attributes:
        name, dtype, shape: as stored; dtypes have safetensors' names.
        nbytes: of its data.
        file: where it lies, or how many files it is spread over.
        read: ``read(begin, n)`` returns n bytes of its data, compared with their digests if there are any.
        ranks: how many ranks hold it and share what is stored.
        tied_to: the name that its data is stored under, where that is another tensor's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    read: Callable[[int, int], bytes]
    ranks: int = 1
    tied_to: str | None = None


class Object(NamedTuple):
    """A pickled object: its class, if that is recorded, and its pickle."""

    cls: str
    nbytes: int
    read: Callable[[], bytes]


class Part(NamedTuple):
    """What one rank stored, or all ranks together.

    Attributes:
        label: in front of names, where ranks have parts of their own.
        tensors: by name.
        digests: of each tensor's stored pieces, by the pieces' names; None without a manifest.
    """

    label: str
    tensors: dict[str, Tensor]
    digests: dict[str, dict[str, snapshots.Digest]] | None


class Source:
    """A checkpoint or file that is read.

    Attributes:
        path, format: where and what it is: "holdfast", "dcp", "safetensors" or "torch".
        layout: of a plain checkpoint, as of `holdfast.save_async`.
        facts: step, saved_at, world_size, attempt and parent, as far as they are recorded.
    """

    format = ""

    def __init__(self, path: str) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}

    @property
    def layout(self) -> str:
        return "holdfast"

    @property
    def has_ranks(self) -> bool:
        """Whether the state of one rank can be read."""
        return False

    def parts(self) -> list[Part]:
        """The tensors as users named them."""
        raise NotImplementedError

    def values(self) -> dict[str, str]:
        """Plain values by name, as text."""
        return {}

    def objects(self) -> dict[str, Object]:
        """Pickled objects by name."""
        return {}

    def views(self) -> dict[str, str]:
        """Tensors by name that are views of others, or consist of several, and that `parts` therefore lacks: their places, as text."""
        return {}

    def containers(self) -> dict[str, tuple[str, bool]]:
        """The kinds of the containers by name, as text, and whether they are empty. Two formats may have other texts."""
        return {}

    def files(self) -> dict[str, snapshots.Digest | None]:
        """Digests of the further files by name; None for an empty one."""
        return {}

    def contents(self) -> dict[str, bytes]:
        """The further files by name."""
        return {}

    def state(self, rank: int | None = None, allow: Iterable[str] = ()) -> Any:
        """The state as nested containers. Large tensors are in pages of files.

        Args:
            rank: whose state to read; default what all ranks had alike.
            allow: classes that objects may be made of, as "module:Class".
        """
        raise NotImplementedError

    def tensors(self, rank: int | None = None) -> dict[str, Any]:
        """The tensors of the state by name; no object is made.

        Raises:
            Error: INVALID_ARGUMENT where two have one name.
        """
        import torch

        found: dict[str, Any] = {}
        for name, leaf in leaves(self.state(rank)):
            if isinstance(leaf, torch.Tensor) and found.setdefault(name, leaf) is not leaf:
                raise Error("INVALID_ARGUMENT", f"load {name} of {self.path}: {TWICE}")
        return found


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Name and value of everything in nested dicts, lists and tuples."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, str(index)))
    else:
        yield ".".join(path), value


def open_source(path: str) -> Source:
    """Opens whatever lies at `path`.

    Raises:
        Error: of the system, of an incomplete or damaged checkpoint, INVALID_ARGUMENT for anything else.
    """
    path = directories.local_path(path, "open", "copy it with `holdfast drain` first")
    with of_system(f"open {path}"):
        mode = os.stat(path).st_mode
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise Error("INVALID_ARGUMENT", f"open {path}: neither a file nor a directory")
        magic = b""
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                magic = file.read(4)
    if not stat.S_ISDIR(mode):
        if magic[:1] == b"\x80" and magic[2:] == b"\x8a\n":  # the header of a safetensors file is never as long
            raise Error("UNIMPLEMENTED", f"open {path}: a torch.save file without a zip archive, as of old versions; load it "
                        "with torch.load and save it again")  # fmt: skip
        if magic != b"PK\3\4":
            return _Safetensors(path)
        from holdfast.cli.framework_sources import TorchFile

        return TorchFile(path)
    names = places.names_in(path, "open")
    kind = directories.format_of(names)
    if kind == "dcp":
        from holdfast.cli.framework_sources import Dcp

        return Dcp(path, names)
    if kind == "holdfast":
        return _Holdfast(path)
    raise Error(
        "INVALID_ARGUMENT",
        f"open {path}: no checkpoint; `holdfast ls {path}` lists checkpoints below a directory",
    )


# ---- With a manifest.


def _read(reader: Any, name: str, begin: int, nbytes: int) -> bytes:
    buffer = ctypes.create_string_buffer(nbytes)
    target = (name, ctypes.addressof(buffer), nbytes, None, begin)
    reader.load([target], True, _native.LOAD_BUFFER_BYTES, 0, "auto", True)
    return buffer.raw


def _tensors_of(reader: Any, only: str = "") -> dict[str, Tensor]:
    files = reader.files
    return {
        name: Tensor(name, dtype, tuple(shape), end - begin, files[file], functools.partial(_read, reader, name))
        for name, dtype, shape, file, begin, end in reader.tensors()
        if not only or files[file] == only
    }


class Stored(NamedTuple):
    """What a manifest names, the digests of all that has bytes, and the files that all ranks share."""

    tensors: dict[str, Tensor]
    digests: dict[str, snapshots.Digest]
    replicated: set[str]


def stored(path: str, manifest: str) -> Stored:
    """What a manifest has."""
    tensors = _tensors_of(_native.CheckpointReader.open_manifest(path, manifest))
    with of_system(f"open {path}/{manifest}"):
        document = json.loads(_regular.read_whole(os.path.join(path, manifest), "open", _regular.MANIFEST_BYTES_MAX)[0])
    replicated = {entry["name"] for entry in document["files"] if entry.get("replicated")}
    return Stored(tensors, snapshots.digests_of(document), replicated)


class _Holdfast(Source):
    format = "holdfast"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.facts = {
            key: value for key, value in _native.inspect(path).items() if key not in ("name", "path", "bytes")
        }

        self._replicated: set[str] = set()

    @functools.cached_property
    def _all(self) -> list[Part]:
        """With what Holdfast stores beside the tensors."""
        world = self.facts["world_size"]
        parts = []
        for rank in range(world):
            found = stored(self.path, _names.manifest(rank, world))
            self._replicated |= found.replicated
            label = f"rank {rank}: " if world > 1 else ""
            digests = {name: {name: digest} for name, digest in found.digests.items()}
            for name, owner in self._tied(found.tensors).items():
                found.tensors[name] = found.tensors[owner]._replace(name=name, tied_to=owner)
                if owner in digests:
                    digests[name] = {name: found.digests[owner]}
            parts.append(Part(label, found.tensors, digests))
        return parts

    def _tied(self, tensors: dict[str, Tensor]) -> dict[str, str]:
        stored = tensors.get(_OWN + "structure")
        with self._of_description():
            found = description.tied(json.loads(stored.read(0, stored.nbytes))) if stored is not None else {}
        return {name: owner for name, owner in found.items() if owner in tensors and name not in tensors}

    def parts(self) -> list[Part]:
        """Replicas, which all ranks name in their manifests, are one part without a label."""
        first = self._all[0]
        alike = {n: t._replace(ranks=len(self._all)) for n, t in first.tensors.items() if t.file in self._replicated}
        parts = [
            part._replace(tensors={n: t for n, t in part.tensors.items() if n not in alike and not n.startswith(_OWN)})
            for part in self._all
        ]
        return [Part("", alike, first.digests), *parts] if alike else parts

    def _of_description(self) -> contextlib.AbstractContextManager[None]:
        return of_damage(f"load {self.path}: its description cannot be used")

    def _structures(self) -> Iterator[tuple[Part, dict[str, Any]]]:
        for part in self._all:
            stored = part.tensors.get(_OWN + "structure")
            if stored is not None:
                yield part, json.loads(stored.read(0, stored.nbytes))

    def _described(self, of: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[tuple[Part, str, Any]]:
        """What a function of `description` finds, by part and name."""
        with self._of_description():
            for part, structure in self._structures():
                for name, found in of(structure).items():
                    yield part, name, found

    def values(self) -> dict[str, str]:
        return {part.label + name: value for part, name, value in self._described(description.values)}

    def objects(self) -> dict[str, Object]:
        found = {}
        for part, name, (cls, begin, length) in self._described(description.objects):
            read = functools.partial(part.tensors[_OWN + "objects"].read, begin, length)
            found[part.label + name] = Object(cls, length, read)
        return found

    def views(self) -> dict[str, str]:
        return {part.label + name: text for part, name, text in self._described(description.views) if name not in part.tensors}

    def containers(self) -> dict[str, tuple[str, bool]]:
        return {part.label + name: container for part, name, container in self._described(description.containers)}

    @property
    def layout(self) -> str:
        files = {tensor.file for name, tensor in self._all[0].tensors.items() if not name.startswith(_OWN)}
        is_hf = self.facts["world_size"] == 1 and any(file.startswith(_HF_FILES) for file in files)
        return "hf" if is_hf else "holdfast"

    @property
    def has_ranks(self) -> bool:
        """False for a checkpoint that the C++ library has saved: it has no structure."""
        return any(_OWN + "structure" in part.tensors for part in self._all)

    def _further(self) -> dict[str, tuple[Part, str]]:
        """The part and the entry of each further file. The index of shards is none: it follows from the tensors."""
        index = _HF_INDEX if self.layout == "hf" else ""
        return {
            name.removeprefix(_FILE): (part, name)
            for part in self._all
            for name in part.tensors
            if name.startswith(_FILE) and name != index
        }

    def files(self) -> dict[str, snapshots.Digest | None]:
        return {file: (part.digests or {}).get(name, {}).get(name) for file, (part, name) in self._further().items()}

    def contents(self) -> dict[str, bytes]:
        stored = {file: part.tensors[name] for file, (part, name) in self._further().items()}
        return {file: entry.read(0, entry.nbytes) for file, entry in stored.items()}

    def _checkpoint(self, rank: int | None) -> Any:
        from holdfast import loading

        world = self.facts["world_size"]
        if rank is not None and not 0 <= rank < world:
            ranks = "0" if world == 1 else f"0 to {world - 1}"
            raise Error("INVALID_ARGUMENT", f"load {self.path}: {counted(world, 'rank')} saved it; pass --rank {ranks}")
        # Without a rank: what all ranks had alike.
        return loading.Checkpoint(self.path, rank=rank, map_location="cpu")

    def state(self, rank: int | None = None, allow: Iterable[str] = ()) -> Any:
        from holdfast.cli import scratch

        if not self.has_ranks:
            return self._mapped()
        with scratch.Memory(scratch_directory):
            return self._checkpoint(rank).state(allow)

    def tensors(self, rank: int | None = None) -> dict[str, Any]:
        from holdfast.cli import scratch

        if not self.has_ranks:
            return self._mapped()
        with scratch.Memory(scratch_directory):
            return dict(self._checkpoint(rank))

    def _mapped(self) -> dict[str, Any]:
        """The tensors of a checkpoint without a structure."""
        from holdfast.cli import scratch

        files = sorted({tensor.file for part in self._all for tensor in part.tensors.values()})
        return {name: t for file in files for name, t in scratch.mapped(os.path.join(self.path, file)).items()}


class _Safetensors(Source):
    format = "safetensors"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            reader = _native.CheckpointReader.open_file(path)
        except Error as error:
            raise Error(
                error.code, f"open {path}: neither a torch.save zip nor safetensors: {error.message}"
            ) from error
        self._tensors = _tensors_of(reader, os.path.basename(path))

    def parts(self) -> list[Part]:
        return [Part("", self._tensors, None)]

    def state(self, rank: int | None = None, allow: Iterable[str] = ()) -> Any:
        from holdfast.cli import scratch

        return scratch.mapped(self.path)
