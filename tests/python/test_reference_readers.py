"""Damaged files of others: verify and the readers of the formats agree on what is sound and on its content.

`verify` may refuse more than they do, for the listed reasons. It must accept nothing that they refuse or read otherwise.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import _programs

LONG = bool(os.environ.get("HOLDFAST_LONG"))
# Files of one example: hypothesis costs more than a file.
FILES = 200


def verdict(path: Path) -> tuple[str, str]:
    """Of `verify`, and its first reason."""
    report = holdfast.verify(path, engine="pwrite", threads=1, direct_io=False)
    return report["verdict"], next((f"{fault['reason']}: {fault['found']}" for fault in report["faults"]), "")


# ---- safetensors.

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "e": torch.zeros(0),
    'é "q"': torch.tensor(7, dtype=torch.int8),
}
PLAIN = safetensors.torch.save(TENSORS, metadata={"format": "pt", "k": "v"})
_LENGTH = struct.unpack("<Q", PLAIN[:8])[0]
HEADER, DATA = json.loads(PLAIN[8 : 8 + _LENGTH]), PLAIN[8 + _LENGTH :]

_NUMBERS = (0, 1, -1, 2, 3, 12, 24, 25, 30, 31, 1 << 31, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30)
_NO_NUMBERS = ("1.0", "1e0", "-0", "01", "true", "null", '"1"', "[]", "{}", " 1", "+1", "0x1", "1E2", "NaN")
_DTYPES = ("F32", "F64", "F16", "BF16", "I8", "U8", "BOOL", "I64", "U64", "C64", "F8_E4M3", "F4", "F6_E2M3", "f32", "", "X", "QINT8")
_NAMES = ("a", "b", "__metadata__", "", "\0", "\n", "x/y", "\ud800", "a" * 300, "holdfast.dtypes")
_SHAPES: tuple[list[int], ...] = ([6], [3, 2], [2, 3, 1], [1] * 40, [], [0], [0, 1 << 62, 1 << 62], [1 << 32, 1 << 32, 0])

# Where verify is stricter: readers differ about the first five, or may; the last is no number of theirs.
STRICTER = re.compile(
    "unknown key|tensor .* a second time|metadata .* a second time|a second time$|does not begin with '{'|"
    "dimension over 2\\^63 - 1"
)


class _Text(str):
    """JSON as it is to stand there."""


def _json(value: Any, choose: random.Random) -> str:
    if isinstance(value, _Text):
        return str(value)
    if isinstance(value, dict):
        value = list(value.items())
        return "{" + ",".join(f"{_json(k, choose)}:{_json(v, choose)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_json(item, choose) for item in value) + "]"
    return json.dumps(value, ensure_ascii=choose.random() < 0.5)


def _damaged_entry(entry: dict[str, Any], choose: random.Random) -> dict[str, Any]:
    shape, offsets = list(entry.get("shape", [])), list(entry.get("data_offsets", [0, 0]))
    kind = choose.randrange(8)
    if kind == 0:
        return {**entry, "dtype": choose.choice(_DTYPES)}
    if kind == 1:
        shape.insert(choose.randrange(len(shape) + 1), choose.choice(_NUMBERS))
        return {**entry, "shape": shape}
    if kind == 2:
        return {**entry, "shape": choose.choice((*_SHAPES, [_Text(choose.choice(_NO_NUMBERS))]))}
    if kind == 3:
        offsets[choose.randrange(2)] = choose.choice(_NUMBERS)
    elif kind == 4:
        offsets[choose.randrange(2)] = _Text(choose.choice(_NO_NUMBERS))
    elif kind == 5:
        offsets.append(30)
    elif kind == 6:
        return {**entry, choose.choice(("x", "dtype ", "")): choose.choice((1, "y", None))}
    else:
        return {key: value for key, value in entry.items() if key != choose.choice(list(entry))}
    return {**entry, "data_offsets": offsets}


def damaged_safetensors(seed: int) -> bytes:
    choose = random.Random(seed)
    entries = [(name, dict(entry)) for name, entry in HEADER.items()]
    data, length = DATA, None
    for _ in range(choose.randint(1, 3)):
        at, kind = choose.randrange(len(entries)), choose.randrange(8)
        name, entry = entries[at]
        if kind < 3 and entry:
            entries[at] = (name, _damaged_entry(entry, choose))
        elif kind == 3 and len(entries) > 1:
            entries.pop(at)
        elif kind == 4:
            entries.append(entries[at])
        elif kind == 5:
            entries[at] = (choose.choice(_NAMES), entry)
        elif kind == 6:
            choose.shuffle(entries)
        elif kind == 7:
            data = data[: choose.randrange(len(data) + 1)] if choose.random() < 0.5 else data + bytes(choose.randint(1, 40))
    text = "{" + ",".join(f"{_json(name, choose)}:{_json(entry, choose)}" for name, entry in entries) + "}"
    header = text.encode("utf-8", "surrogatepass")
    kind = choose.randrange(12)
    if kind == 0:
        header += b" " * choose.randint(1, 9)
    elif kind == 1:
        header = b" " + header
    elif kind == 2:
        header = header.replace(b",", b" ,\n\t")
    elif kind == 3:
        header += choose.choice((b"\0", b"x", b"{}", b"\n", b"}"))
    elif kind == 4:
        length = len(header) + choose.choice((-1, 1, 1 << 40, 1 << 63))
    elif kind == 5:
        at = choose.randrange(len(header))
        header = header[:at] + bytes([choose.randrange(256)]) + header[at + 1 :]
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def read_by_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]] | None:
    """Dtype, shape and bytes by name; None where the library refuses the file."""
    try:
        # In the order of their bytes; empty tensors have none.
        with safetensors.safe_open(path, "pt") as file:
            names = file.keys()
            found = {}
            for name in names:
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
        raw = dict(safetensors.deserialize(path.read_bytes()))
        return {name: (*found[name], bytes(raw[name]["data"])) for name in names}
    except safetensors.SafetensorError:
        return None


def adopted(directories: list[Path]) -> list[dict[str, tuple[str, list[int], bytes]]]:
    """The same by the manifests that verify writes for files of others."""
    program = _programs.program("verify-checkpoint")
    subprocess.run([program, "--adopt", "-q", *directories], check=True, capture_output=True)
    all_found = []
    for directory in directories:
        manifest = json.loads(next(directory.glob("*.json")).read_bytes())
        data = (directory / "model.safetensors").read_bytes()
        all_found.append(
            {t["name"]: (t["dtype"], t["shape"], data[t["begin"] : t["end"]]) for t in manifest["tensors"]}
        )
    return all_found


def compare_safetensors(seeds: range, directory: Path) -> Counter[str]:
    """Counts the files by what both say. Fails where verify accepts what the library refuses or reads otherwise."""
    counts: Counter[str] = Counter()
    sound: list[tuple[int, Path, Any]] = []
    for seed in seeds:
        place = directory / str(seed)
        place.mkdir()
        path = place / "model.safetensors"
        path.write_bytes(damaged_safetensors(seed))
        (ours, reason), theirs = verdict(path), read_by_safetensors(path)
        counts[f"{ours}, {'refused' if theirs is None else 'read'}"] += 1
        if ours == "sound":
            assert theirs is not None, f"seed {seed}: verify accepts a file that the library refuses"
            if "" not in theirs:  # manifests have names
                sound.append((seed, place, theirs))
        elif theirs is not None:
            assert STRICTER.search(reason), f"seed {seed}: verify refuses a file that the library reads: {reason}"
    for (seed, _, theirs), ours_read in zip(sound, adopted([place for _, place, _ in sound]), strict=True):
        assert ours_read == theirs, f"seed {seed}"
    return counts


@settings(max_examples=100 if LONG else 3, deadline=None, derandomize=not LONG)
@given(first=st.integers(0, 1 << 40))
def test_headers_are_read_as_by_the_safetensors_library(tmp_path_factory: pytest.TempPathFactory, first: int) -> None:
    counts = compare_safetensors(range(first, first + FILES), tmp_path_factory.mktemp("files"))
    assert counts["sound, read"] > FILES // 50  # or the test would prove nothing
    assert counts["corrupt, refused"] > FILES // 4


@pytest.mark.planted("accepts_each_header")
def test_a_header_that_is_accepted_too_easily_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "verdict", lambda path: ("sound", ""))
    with pytest.raises(AssertionError, match="the library refuses"):
        compare_safetensors(range(50), tmp_path)


# ---- Archives of torch.save.

STATE = {"w": torch.arange(40.0).view(5, 8), "b": torch.ones(7, dtype=torch.bfloat16), "s": [1, "x", None], "e": torch.zeros(0)}


def _archives(directory: Path) -> list[bytes]:
    torch_made, plain = io.BytesIO(), io.BytesIO()
    torch.save(STATE, torch_made)
    holdfast.save_file(STATE, directory / "ours.pt", wait=True)
    with zipfile.ZipFile(plain, "w") as file:
        for i in range(3):
            file.writestr(zipfile.ZipInfo(f"r/{i}"), bytes(range(40 + i)))
    return [torch_made.getvalue(), (directory / "ours.pt").read_bytes(), plain.getvalue()]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return _archives(tmp_path_factory.mktemp("archives"))


_SIGNATURES = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08")


def damaged_archive(archives: list[bytes], seed: int) -> bytes:
    """Mostly in the structures; the data has its checksums."""
    choose = random.Random(seed)
    data = bytearray(choose.choice(archives))
    places = [found.start() for signature in _SIGNATURES for found in re.finditer(re.escape(signature), data)]
    for _ in range(choose.choice((1, 1, 1, 2))):
        kind, at = choose.randrange(8), choose.randrange(len(data))
        if choose.random() < 0.7:
            at = min(len(data) - 1, choose.choice(places) + choose.randrange(60))
        if kind < 3:
            data[at] ^= 1 << choose.randrange(8)
        elif kind == 3:
            data[at] = choose.randrange(256)
        elif kind == 4:
            width = choose.choice((2, 4, 8))
            data[at : at + width] = struct.pack("<Q", choose.choice((0, 1, 0xFFFF, 0xFFFFFFFF, (1 << 64) - 1)))[:width]
        elif kind == 5:
            data[at:at] = choose.choice((b"\0", b"PK\5\6", b"x" * choose.randint(1, 70)))
        elif kind == 6:
            del data[at : at + choose.randint(1, 30)]
        else:
            front, behind = choose.choice(((b"", bytes(9)), (b"x", b""), (bytes(data), b"")))
            data[:] = front + bytes(data) + behind
    return bytes(data)


def read_by_zipfile(path: Path) -> dict[str, bytes] | None:
    """The records by name; None where Python refuses one, or the file."""
    try:
        with zipfile.ZipFile(path) as file:
            return {info.filename: file.read(info) for info in file.infolist()}
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, OSError, ValueError, struct.error):
        return None


def _is_state(found: Any) -> bool:
    return set(found) == set(STATE) and all(
        torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        for name, value in STATE.items()
    )


def _no_checksum(path: Path) -> bool:
    return "carry no CRC32" in holdfast.verify(path)["note"]


def compare_archives(archives: list[bytes], seeds: range, path: Path) -> Counter[str]:
    """Counts the files by what all say. Fails where verify accepts what another reader refuses or reads otherwise."""
    counts: Counter[str] = Counter()
    wholes = []
    for data in archives:
        path.write_bytes(data)
        wholes.append(read_by_zipfile(path))
    for seed in seeds:
        data = damaged_archive(archives, seed)
        path.write_bytes(data)
        ours, theirs = verdict(path)[0], read_by_zipfile(path)
        if ours != "sound" or _no_checksum(path):
            counts[f"{ours}, {'refused' if theirs is None else 'read'}"] += 1
            continue
        counts["sound"] += 1
        records = {} if theirs is None else theirs
        # An empty record has no bytes to lose: Python compares its local header in more fields.
        if theirs is not None:
            bytes_of = Counter(bytes(record) for record in records.values() if record)
            assert any(
                bytes_of == Counter(record for record in whole.values() if record) for whole in wholes if whole is not None
            ), f"seed {seed}: Python reads other bytes"
        if any(name.endswith("/data.pkl") for name in records):
            try:
                found = torch.load(path, weights_only=True)
            except (RuntimeError, ValueError, pickle.UnpicklingError) as error:
                # Names are in no checksum. One that torch looks for may be gone.
                assert not _named_as_saved(records, wholes), f"seed {seed}: torch.load refuses it: {error}"
            else:
                assert _is_state(found), f"seed {seed}: torch.load reads other values"
                counts["loaded"] += 1
    return counts


def _named_as_saved(records: dict[str, bytes], wholes: list[dict[str, bytes] | None]) -> bool:
    return any(whole is not None and set(records) == set(whole) for whole in wholes)


@settings(max_examples=100 if LONG else 3, deadline=None, derandomize=not LONG)
@given(first=st.integers(0, 1 << 40))
def test_archives_are_read_as_by_zipfile_and_torch(
    archives: list[bytes], tmp_path_factory: pytest.TempPathFactory, first: int
) -> None:
    counts = compare_archives(archives, range(first, first + FILES), tmp_path_factory.mktemp("files") / "x.pt")
    assert counts["sound"] > FILES // 20 and counts["loaded"] > FILES // 50
    assert counts["corrupt, refused"] > FILES // 4


def _marked_as_directory(data: bytes) -> bytes:
    at = data.rindex(b"PK\1\2") + 38
    return data[:at] + b"\x10" + data[at + 1 :]


def test_a_record_that_is_marked_as_a_directory_is_corrupt(archives: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(_marked_as_directory(archives[0]))
    assert verdict(path)[0] == "corrupt"


@pytest.mark.planted("accepts_each_archive")
def test_a_reader_that_is_too_easy_is_found(
    archives: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "verdict", lambda path: ("sound", ""))
    with pytest.raises(AssertionError, match="reads other|refuses it"):
        compare_archives(archives, range(200), tmp_path / "x.pt")


def test_every_bit_of_the_data_is_in_a_checksum(archives: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    choose: Callable[[int], int] = random.Random(1).randrange
    for data in archives[:2]:
        path.write_bytes(data)
        with zipfile.ZipFile(path) as file:
            places = [
                (info.header_offset + 30 + sum(struct.unpack("<HH", data[info.header_offset + 26 : info.header_offset + 30])),
                 info.file_size)
                for info in file.infolist() if info.file_size
            ]  # fmt: skip
        for begin, nbytes in places:
            at = begin + choose(nbytes)
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << choose(8)]) + data[at + 1 :])
            assert verdict(path)[1].startswith("crc32")
