"""``holdfast diff``: what differs between two checkpoints, by their digests or by their bytes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from holdfast import snapshots
from holdfast.cli import sources, text
from holdfast.cli.sources import Object, Part, Source, Tensor
from holdfast.errors import Error

_DESCRIPTION = """\
Compares two checkpoints or files by the names of their tensors. The digests in the manifests show
which tensors differ: no data is read. Plain values and pickled objects of plain checkpoints are read
and compared, and the kinds of their containers; further files (as "file NAME") by their digests.
Two parts have no digests to compare: files without a manifest, and a large tensor that lies at
another place in its file than before. --read reads and compares those.
"""
_EPILOG = """\
output, one line for each difference:
  changed NAME     another dtype, shape or content
  added NAME       only in B
  removed NAME     only in A
  unknown NAME     not comparable by digests; --read reads it

examples:
  holdfast diff run/step-100 run/step-200
  holdfast diff --read model.pt run/step-200    # torch.save zip and checkpoint
  holdfast diff -q run/step-100 copy/step-100 && echo the same

exit status: 0 the same, 1 different, 2 trouble (also: nothing differs, but something is unknown)
"""
_CHUNK = 64 << 20
_KINDS = ("changed", "added", "removed", "unknown")


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("a", metavar="A", help="the earlier checkpoint or file")
    parser.add_argument("b", metavar="B", help="the later one")
    parser.add_argument("--read", action="store_true", help="read what has no digests to compare")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing; the exit status tells")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


class Differences:
    """Names by what became of them, with an explanation; and how many are identical."""

    def __init__(self) -> None:
        self.names: dict[str, dict[str, str]] = {kind: {} for kind in _KINDS}
        self.identical = 0

    def add(self, name: str, kind: str, why: str = "") -> None:
        if kind == "identical":
            self.identical += 1
        else:
            self.names[kind][name] = why

    @property
    def status(self) -> int:
        if any(self.names[kind] for kind in ("changed", "added", "removed")):
            return 1
        return 2 if self.names["unknown"] else 0


def run(arguments: argparse.Namespace) -> int:
    a, b = sources.open_source(arguments.a), sources.open_source(arguments.b)
    found = compare(a, b, arguments.read)
    if arguments.json:
        text.document("diff", a=a.path, b=b.path, identical=found.identical, **found.names)
    elif not arguments.quiet:
        for kind, names in found.names.items():
            text.lines(f"{kind} {name}{why and ': ' + why}" for name, why in names.items())
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in found.names.items() if names)
        print(f"{counts or 'no differences'}, {found.identical} identical")
    return found.status


def compare(a: Source, b: Source, read: bool) -> Differences:
    """Compares two sources.

    Raises:
        Error: INVALID_ARGUMENT where one has no digests and `read` is false.
    """
    found = Differences()
    parts_a, parts_b = ({part.label: part for part in s.parts()} for s in (a, b))
    for source, parts in ((a, parts_a), (b, parts_b)):
        if not read and any(part.digests is None for part in parts.values()):
            raise Error(
                "INVALID_ARGUMENT",
                f"compare {source.path}: it has no manifest with digests; pass --read to read and compare",
            )
    for label in {**parts_a, **parts_b}:
        empty = Part(label, {}, {})
        _compare_parts(parts_a.get(label, empty), parts_b.get(label, empty), read, found)
    _compare_named(a.values(), b.values(), found, lambda old, new: (old == new, f"{old} -> {new}"))
    _compare_named(a.objects(), b.objects(), found, _compare_objects)
    # A view that the other source has as a tensor of its own is added or removed there.
    tensors = {part.label + name for parts in (parts_a, parts_b) for part in parts.values() for name in part.tensors}
    views_a, views_b = ({name: view for name, view in s.views().items() if name not in tensors} for s in (a, b))
    _compare_named(views_a, views_b, found, lambda old, new: (old == new, "another part or form of what is stored"))
    _compare_named(_files(a), _files(b), found, lambda old, new: (old == new, ""))
    if a.format == b.format:
        _compare_containers(a.containers(), b.containers(), found)
    return found


def _files(source: Source) -> dict[str, Any]:
    return {f"file {name}": digest for name, digest in source.files().items()}


def _compare_parts(before: Part, now: Part, read: bool, found: Differences) -> None:
    for name in {**before.tensors, **now.tensors}:
        old, new = before.tensors.get(name), now.tensors.get(name)
        label = now.label + name
        if old is None or new is None:
            found.add(label, "added" if old is None else "removed")
        elif (old.dtype, old.shape) != (new.dtype, new.shape):
            found.add(label, "changed", f"{_form(old)} -> {_form(new)}")
        else:
            kind = _judge_digests(before, now, name)
            if kind == "unknown" and read:
                kind = "identical" if _same_bytes(old, new) else "changed"
            found.add(label, kind)


def _judge_digests(before: Part, now: Part, name: str) -> str:
    """Whether a tensor that both have is "identical", "changed" or "unknown"."""
    if before.digests is None or now.digests is None:
        return "unknown"
    old, new = (
        snapshots.Snapshot("", 0, "", part.digests.get(name, {})) for part in (before, now) if part.digests is not None
    )
    pieces = snapshots.compare(old, new)
    if pieces.not_comparable or pieces.added or pieces.removed:
        return "unknown"
    return "changed" if pieces.changed else "identical"


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return all(
        a.read(begin, size) == b.read(begin, size)
        for begin in range(0, a.nbytes, _CHUNK)
        for size in [min(_CHUNK, a.nbytes - begin)]
    )


def _compare_containers(a: Mapping[str, tuple[str, bool]], b: Mapping[str, tuple[str, bool]], found: Differences) -> None:
    """What the names of their contents do not show: their kinds, and empty ones."""
    for name in {**a, **b}:
        shown = name or "state"
        if name not in a or name not in b:
            kind, is_empty = a[name] if name in a else b[name]
            if is_empty:
                found.add(shown, "removed" if name in a else "added", f"empty {kind}")
        elif a[name][0] != b[name][0]:
            found.add(shown, "changed", f"{a[name][0]} -> {b[name][0]}")


def _compare_objects(old: Object, new: Object) -> tuple[bool, str]:
    return old.cls == new.cls and old.nbytes == new.nbytes and old.read() == new.read(), "a pickled object"


def _compare_named(a: Mapping[str, Any], b: Mapping[str, Any], found: Differences, judge: Any) -> None:
    for name in {**a, **b}:
        if name not in a or name not in b:
            found.add(name, "removed" if name in a else "added")
            continue
        same, why = judge(a[name], b[name])
        found.add(name, "identical" if same else "changed", "" if same else why)
