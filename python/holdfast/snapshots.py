"""The stale-snapshot alarm: what a save's digests say about the one before it.

A trainer that hands out a cached copy of its state saves the same bytes again and again, and every
checkpoint is sound. Only a comparison shows it. It costs no byte of data: the manifests of both
saves have digests of everything.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from holdfast import _names, _native
from holdfast._dcp_directories import series_of
from holdfast._process import PerProcess
from holdfast.errors import Error, printable

logger = logging.getLogger("holdfast")

# So many of the tensors that did not change, and of those that did, are named in the report.
NAMES_MAX = 20
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_RANDOM = re.compile(r"rng\w*|\w*rng|\w*loaders?")
_RANDOM_UNLESS_FLOATS = re.compile(_RANDOM.pattern + "|(data|batch|distributed)?samplers?|generators?")
_OWN = "holdfast:"  # what Holdfast stores beside the tensors
_REMEMBERED_MAX = 64  # saves, one for each directory and rank
_SIBLINGS_MAX = 10_000

# Whether "all tensors are identical" is a warning; see holdfast.configure.
warning = True



class Digest(NamedTuple):
    """What a manifest knows about one tensor's bytes."""

    layout: tuple[str, int, int]  # dtype, bytes, and where in a chunk it begins if it spans several
    elements: int
    digest: bytes  # of all digests that cover it, and nothing else


class Snapshot(NamedTuple):
    """The tensors of one save of one rank."""

    path: str
    step: int
    attempt: str
    tensors: dict[str, Digest]


class _Previous(PerProcess):
    """The save of each directory, format and rank that began last, and when it did."""

    def clear(self) -> None:
        self.of: OrderedDict[tuple[str, str, int, int], tuple[int, Snapshot]] = OrderedDict()


_previous = _Previous()


class Comparison(NamedTuple):
    """Names of tensors of the later save, by what became of them since the earlier one."""

    identical: list[str]
    changed: list[str]
    not_comparable: list[str]  # there before, but laid out differently
    added: list[str]
    removed: list[str]


def snapshot_of(manifest: dict[str, Any], path: str = "") -> Snapshot:
    """What there is to compare of a parsed manifest (FORMAT.md, section 3)."""
    tensors = {name: digest for name, digest in digests_of(manifest).items() if not name.startswith(_OWN)}
    return Snapshot(path, manifest["step"], manifest["attempt"], tensors)


def digests_of(manifest: dict[str, Any]) -> dict[str, Digest]:
    """The digests of all that a parsed manifest names and that has bytes."""
    files = [f["digests"] for f in manifest["files"]]
    tensors = {}
    for t in manifest["tensors"]:
        name, begin, end = t["name"], t["begin"], t["end"]
        if begin == end:
            continue
        first, last = begin // _native.CHUNK_BYTES, (end - 1) // _native.CHUNK_BYTES
        chunks = files[t["file"]]
        head = t.get("head") or chunks[first]
        if first == last:
            digest, offset = bytes.fromhex(head), 0
        else:
            tail = t.get("tail") or chunks[last]
            whole = hashlib.sha256("".join((head, *chunks[first + 1 : last], tail)).encode())
            digest, offset = whole.digest()[:16], begin % _native.CHUNK_BYTES
        elements = 1
        for n in t["shape"]:
            elements *= n
        tensors[name] = Digest((t["dtype"], end - begin, offset), elements, digest)
    return tensors


def compare(earlier: Snapshot, later: Snapshot) -> Comparison:
    """Tensor by tensor, by name."""
    result = Comparison([], [], [], [], [n for n in earlier.tensors if n not in later.tensors])
    for name, now in later.tensors.items():
        before = earlier.tensors.get(name)
        if before is None:
            result.added.append(name)
        elif before.layout[:2] != now.layout[:2]:
            result.changed.append(name)
        elif before.layout != now.layout:
            result.not_comparable.append(name)
        elif before.digest == now.digest:
            result.identical.append(name)
        else:
            result.changed.append(name)
    return result


# ---- The manifests of a rank.


def _manifest_in(directory: str, rank: int, world_size: int, attempt: str = "") -> str | None:
    """Path of the rank's manifest in a checkpoint: of an attempt, the usual one, or the newest.

    DCP directories have the attempt in its name, and for a moment those of two saves.
    """
    for name in dict.fromkeys((_names.manifest(rank, world_size, attempt), _names.manifest(rank, world_size))):
        if os.path.exists(path := os.path.join(directory, name)):
            return path
    found = glob.glob(os.path.join(glob.escape(directory), _names.manifest(rank, world_size, "*")))
    return max(found, key=os.path.getmtime, default=None)


def _format_of(manifest: str) -> str:
    """``"dcp"`` or ``"holdfast"``: the two name the same tensors otherwise."""
    return _names.format_of(os.path.basename(manifest))


def _read(manifest: str) -> Snapshot:
    with open(manifest, "rb") as file:
        return snapshot_of(json.loads(file.read()), os.path.dirname(manifest))


def _newest_before(path: str, manifest: str, rank: int, world_size: int, began: int) -> Snapshot | None:
    """The newest complete checkpoint beside `path` that was there when its save began, and is of its format."""
    directory = os.path.dirname(path)
    format = _format_of(manifest)
    # A save that was called later may end first.
    called = min(os.stat(manifest).st_mtime_ns, time.time_ns() - (time.monotonic_ns() - began))
    candidates = []
    with os.scandir(directory) as entries:
        for number, entry in enumerate(entries):
            if number >= _SIBLINGS_MAX:
                break
            if entry.path == path or _names.kind_of(entry.name) or not entry.is_dir():
                continue
            other = _manifest_in(entry.path, rank, world_size)
            if other is not None and _format_of(other) == format and (age := os.stat(other).st_mtime_ns) <= called:
                candidates.append((age, other))
    for _, other in sorted(candidates, reverse=True)[:2]:
        try:
            return _read(other)
        except (OSError, ValueError, LookupError, TypeError):
            continue  # damaged, or removed in this moment by retention
    return None


# ---- At the end of every save.


def _groups(names: Iterable[str]) -> dict[str, int]:
    """How many tensors each entry of the state's top has."""
    count: dict[str, int] = {}
    for name in names:
        group = name.split(".", 1)[0]
        count[group] = count.get(group, 0) + 1
    return count


def describe(earlier: Snapshot, later: Snapshot) -> dict[str, Any]:
    """A comparison as a report has it."""
    found = compare(earlier, later)
    compared = len(found.identical) + len(found.changed)
    all_of = _groups(later.tensors)
    return {
        "previous": earlier.path,
        "previous_step": earlier.step,
        "tensors_compared": compared,
        "tensors_identical": len(found.identical),
        "tensors_changed": len(found.changed),
        "tensors_not_comparable": len(found.not_comparable),
        "tensors_added": len(found.added),
        "tensors_removed": len(found.removed),
        "identical": found.identical[:NAMES_MAX],
        "changed": found.changed[:NAMES_MAX],
        "identical_groups": [g for g, n in _groups(found.identical).items() if n == all_of[g]],
        "stale": _is_stale(found, later),
    }


def is_random_state(name: str, dtype: str) -> bool:
    """Whether a tensor is random state, or where data loading stands, by its name.

    Words count, at dots, underscores and changes of case: ``upsamplers`` are layers. So are floats
    under ``generator`` or ``sampler``: what these have for a state is made of integers.
    """
    floats = dtype.startswith(("F", "BF", "C"))
    pattern = _RANDOM if floats else _RANDOM_UNLESS_FLOATS
    return any(pattern.fullmatch(word.lower()) for word in _WORD.findall(name))


def _is_stale(found: Comparison, later: Snapshot) -> bool:
    """Whether nothing that a step of training changes has changed.

    Counters and random state are left out of the question: they also go on in a trainer whose
    weights are a stale copy. So a state that has nothing else is never stale.
    """

    def counts(name: str) -> bool:
        tensor = later.tensors[name]
        return tensor.elements > 1 and not is_random_state(name, tensor.layout[0])

    identical = any(counts(n) for n in found.identical)
    changed = any(counts(n) for n in found.changed)
    others = found.not_comparable or found.added or found.removed
    return identical and not changed and not others


def compare_with_previous(subject: Any, report: dict[str, Any] | None, error: Error | None) -> None:
    """The observer that adds the comparison to a report, and warns."""
    if report is None or error is not None:
        return
    rank, world_size = subject.extra["rank"], subject.extra["world_size"]
    path = os.path.abspath(subject.path)
    manifest = _manifest_in(path, rank, world_size, report["attempt"])
    if manifest is None:
        return  # a layout without one: nothing to compare
    later = _read(manifest)._replace(path=path)
    key = (os.path.dirname(path), _format_of(manifest), rank, world_size)
    began = int(report.get("entered_ns") or time.monotonic_ns())
    with _previous.lock:
        last = _previous.of.get(key)
        if last is not None and last[0] > began:
            return  # saves may end in another order than they began in
        _previous.of[key] = began, later
        _previous.of.move_to_end(key)
        while len(_previous.of) > _REMEMBERED_MAX:
            _previous.of.popitem(last=False)
    earlier = last[1] if last is not None else _newest_before(path, manifest, rank, world_size, began)
    if earlier is None or earlier.attempt == later.attempt:
        return
    result = describe(earlier, later)
    report.update(result)
    if result["stale"] and warning and _is_news(later, earlier):
        logger.warning("[rank %d] %s", rank, printable(_sentence(later, earlier, result)))


def _is_news(later: Snapshot, earlier: Snapshot) -> bool:
    """Whether the training has gone on between two saves, as far as they say.

    The same step twice, as at the end of a run, is no news. Without steps `last` and `best` may be of one.
    """
    if later.step or earlier.step:
        return later.step != earlier.step
    return series_of(os.path.basename(later.path)) == series_of(os.path.basename(earlier.path))


def _sentence(later: Snapshot, earlier: Snapshot, result: dict[str, Any]) -> str:
    compared, changed = result["tensors_compared"], result["tensors_changed"]
    identical = result["tensors_identical"]
    what = f"all {compared} tensors are" if compared > 1 else "its tensor is"
    if changed:
        what = f"{identical} of {compared} tensors, all but counters and random state, are"
    return (
        f"{later.path} (step {later.step}): {what} identical to the previous save, "
        f"{earlier.path} (step {earlier.step}). Is what is saved the state that is trained, or a "
        "cached copy of it? holdfast.configure(stale_warning=False) turns this off"
    )
