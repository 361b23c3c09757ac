"""Damage to whole chunks of committed checkpoints, whose files have several: found, with each tensor and the place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from altered import CHUNK, Checked, State

MIB = 1 << 20
# The middle tensor has the end of the first chunk, two chunks and the begin of the last one.
SIZES = {"first": 3 * MIB + 5, "middle": 9 * MIB + 77, "last": MIB + 3}


def state_of(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8) for name, nbytes in SIZES.items()
    }


@pytest.fixture(params=["plain", "dcp", "save_file", "adopted", "adopted zip"], scope="module")
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    return Checked(request.param, tmp_path_factory.mktemp("checkpoints"), state_of)


def large(checked: Checked) -> tuple[str, list[range]]:
    """The file with the tensors, and its chunks."""
    name, data = max(checked.files.items(), key=lambda item: len(item[1]))
    chunks = [range(begin, min(begin + CHUNK, len(data))) for begin in range(0, len(data), CHUNK)]
    assert len(chunks) == 4 and name in checked.digested
    return name, chunks


Patches = Callable[[bytes, bytes, list[range]], Iterator[tuple[str, dict[int, bytes]]]]


def bits(data: bytes, _: bytes, chunks: list[range]) -> Iterator[tuple[str, dict[int, bytes]]]:
    for number, chunk in enumerate(chunks):
        for at in (chunk[0], chunk[len(chunk) // 3], chunk[-1]):
            yield f"a bit of byte {at}", {at: bytes([data[at] ^ 1 << number])}
    yield "a bit in every chunk", {c[MIB // 2]: bytes([data[c[MIB // 2]] ^ 128]) for c in chunks}


def swapped(data: bytes, _: bytes, chunks: list[range]) -> Iterator[tuple[str, dict[int, bytes]]]:
    """And a chunk in the place of another one, which is then there twice."""
    for first, one in enumerate(chunks):
        for second, other in enumerate(chunks):
            shorter = min(len(one), len(other))
            here, there = data[one[0] : one[0] + shorter], data[other[0] : other[0] + shorter]
            if first < second:
                yield f"chunks {first} and {second} swapped", {one[0]: there, other[0]: here}
            if first != second:
                yield f"chunk {first} in the place of chunk {second}", {other[0]: here}


def zeroed(_: bytes, __: bytes, chunks: list[range]) -> Iterator[tuple[str, dict[int, bytes]]]:
    for number, chunk in enumerate(chunks):
        yield f"chunk {number} zeroed", {chunk[0]: bytes(len(chunk))}


def stale(_: bytes, older: bytes, chunks: list[range]) -> Iterator[tuple[str, dict[int, bytes]]]:
    """The last chunk has what tells of which save a single file is."""
    for number, chunk in enumerate(chunks[:-1]):
        yield f"chunk {number} of an older save", {chunk[0]: older[chunk[0] : chunk[-1] + 1]}


def told(checked: Checked, what: str, old: bytes, new: bytes, name: str) -> list[str]:
    """What is wrong about verifying and loading. Loading names a tensor that has changed, or the file if its size has."""
    wrong = checked.escapes(what)
    changed = {t.name for t in checked.digested[name] if old[t.begin : t.end] != new[t.begin : t.end]} & SIZES.keys()
    named = changed if len(old) == len(new) else {name}
    if not checked.format.others and changed and not any(each in checked.said for each in named):
        wrong.append(f"{what}: {changed} have changed, and loading says {checked.said!r}")
    return wrong


@pytest.mark.parametrize(("patches", "hole"), [(bits, False), (swapped, False), (zeroed, False), (zeroed, True), (stale, False)])
def test_chunks(checked: Checked, patches: Patches, hole: bool) -> None:
    name, chunks = large(checked)
    wrong, number = [], 0
    data, older = checked.files[name], next(checked.older.glob(name)).read_bytes()
    for what, places in patches(data, older, chunks):
        with checked.patched(name, places, hole):
            assert not hole or (checked.path / name).stat().st_blocks * 512 < len(data)
            wrong += told(checked, what, data, checked.new[name] or b"", name)
        number += 1
    assert not wrong, "\n".join(wrong[:20])
    assert number >= len(chunks) - 1 and checked.outcome() == ("sound", "")


def test_whole_chunks_less_or_more(checked: Checked) -> None:
    name, chunks = large(checked)
    data = checked.files[name]
    wrong = []
    for what, new in {
        **{f"cut at {chunk[0]}": data[: chunk[0]] for chunk in chunks},
        "with a chunk more": data + data[:CHUNK], "with a chunk of zeros more": data + bytes(CHUNK),
        **{f"without chunk {n}": data[: chunk[0]] + data[chunk[-1] + 1 :] for n, chunk in enumerate(chunks)},
    }.items():  # fmt: skip
        with checked.changed(name, new):
            wrong += told(checked, what, data, new, name)
    assert not wrong, "\n".join(wrong[:20])
