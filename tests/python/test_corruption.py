"""Damage to committed checkpoints of every format: verifying and loading find it, or it is proved harmless.

A format's files are changed in many ways, one at a time, and restored. After each change, what verifying calls
sound loads and is equal, bit for bit; and loading never returns other bytes. In bounded memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import struct
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from altered import CHUNK, FORMATS, PAGE, Checked, bounded, verified
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
from holdfast import _native
from holdfast.integrity import readers

LONG = bool(os.environ.get("HOLDFAST_LONG"))
PLACES = 1 << 30 if LONG else 40  # of a file, at which a bit changes


def state_of(seed: int) -> dict[str, Any]:
    """The sizes are the same with every seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(7, 11, generator=generator),
        "bias": torch.randn(13, generator=generator).bfloat16(),
        "long": torch.randint(0, 256, (2 * PAGE + 5,), generator=generator, dtype=torch.uint8),
        "step": torch.tensor(seed),
    }


@pytest.fixture(params=FORMATS, scope="module")
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    return Checked(request.param, tmp_path_factory.mktemp("checkpoints"), state_of)


def test_a_bit_in_every_byte(checked: Checked) -> None:
    escapes = []
    for name, data in checked.files.items():
        for number, at in enumerate(range(0, len(data), max(1, len(data) // PLACES))):
            new = bytearray(data)
            new[at] ^= 1 << number % 8
            with checked.changed(name, bytes(new)):
                escapes += checked.escapes(f"{name}, a bit of byte {at}")
    assert not escapes, "\n".join(escapes[:20])


def alterations(data: bytes, older: bytes | None) -> Iterator[tuple[str, bytes | None]]:
    yield "removed", None
    for length in {0, 1, 8, len(data) // 2, len(data) - 1}:
        yield f"truncated to {length}", data[:length]
    yield "extended by a byte", data + b"\0"
    yield "extended by a page", data + bytes(PAGE)
    yield "twice", data + data
    yield "zeroed", bytes(len(data))
    for begin in range(0, len(data), PAGE):
        yield f"page {begin // PAGE} zeroed", data[:begin] + bytes(len(data[begin : begin + PAGE])) + data[begin + PAGE :]
    if len(data) >= 2 * PAGE:
        pages = [data[begin : begin + PAGE] for begin in range(0, len(data), PAGE)]
        for first in range(len(pages) - 2):
            swapped = [*pages]
            swapped[first], swapped[first + 1] = pages[first + 1], pages[first]
            yield f"pages {first} and {first + 1} swapped", b"".join(swapped)
    if older is not None:
        yield "of an older save", older
        yield "half of an older save", older[: len(older) // 2] + data[len(older) // 2 :]


def test_altered_files(checked: Checked) -> None:
    escapes = []
    for name, data in checked.files.items():
        old = checked.older / name
        for what, new in alterations(data, old.read_bytes() if old.exists() else None):
            if new == data:
                continue
            with checked.changed(name, new):
                escapes += checked.escapes(f"{name} {what}")
    assert not escapes, "\n".join(escapes[:20])


def test_swapped_and_doubled_files(checked: Checked) -> None:
    escapes = []
    names = list(checked.files)
    for first in names:
        for second in names:
            if first == second:
                continue
            with checked.changed(first, checked.files[second]):
                escapes += checked.escapes(f"{second} in the place of {first}")
                with checked.changed(second, checked.files[first]):
                    escapes += checked.escapes(f"{first} and {second} swapped")
        for name in ("rank-00001-of-00002.manifest.json", "rank-00000-of-00002.manifest.json",
                     "rank-00000-of-00001.manifest.json", f"rank-00000-of-00001-{'1' * 32}.manifest.json",
                     "holdfast.commit.json", f"holdfast.commit-{'1' * 32}.json", "model.safetensors", ".metadata"):
            if name not in checked.files:
                with checked.changed(name, checked.files[first]):
                    escapes += checked.escapes(f"{first} once more as {name}")
    assert not escapes, "\n".join(escapes[:20])


def test_files_of_an_older_save_in_every_mixture(checked: Checked) -> None:
    """Of the same shape: the sizes fit, and every manifest is sound by itself."""
    escapes = []
    older = {file.name: file.read_bytes() for file in checked.older.iterdir()}
    differing = [name for name in older if checked.files.get(name) != older[name]]
    for mixture in range(1, (1 << len(differing)) - 1):  # all of them are the older save itself
        taken = [name for number, name in enumerate(differing) if mixture >> number & 1]
        if all(name in taken or name.startswith("holdfast.commit") for name in differing):
            continue  # the older save, as an earlier version would have left it
        with contextlib.ExitStack() as stack:
            for name in taken:
                stack.enter_context(checked.changed(name, older[name]))
            escapes += checked.escapes(f"of an older save: {', '.join(taken)}")
    assert not escapes, "\n".join(escapes[:20])


def test_what_is_no_file(checked: Checked, tmp_path: Path) -> None:
    """A link, a pipe, a directory, a hole: nothing hangs, and what a link hides is not taken on trust."""
    escapes = []
    for name, data in checked.files.items():
        elsewhere = tmp_path / name
        elsewhere.write_bytes(bytes([data[0] ^ 1]) + data[1:] if data else b"x")
        for what in ("a link to damage", "a link to nothing", "a link to itself", "a pipe", "a directory", "a hole"):
            with checked.changed(name, None) as file:
                if what == "a directory":
                    file.mkdir()
                elif what == "a pipe":
                    if checked.format.others:
                        continue  # another program's reader would wait
                    os.mkfifo(file)
                elif what == "a hole":
                    file.touch()
                    os.truncate(file, len(data))
                else:
                    file.symlink_to({"damage": elsewhere, "nothing": tmp_path / "none", "itself": file}[what.split()[-1]])
                escapes += checked.escapes(f"{name} is {what}")
    assert not escapes, "\n".join(escapes[:20])


def test_a_bit_in_every_chunk_is_told_with_tensor_and_range(tmp_path: Path) -> None:
    state = {"a": torch.zeros(CHUNK - 1, dtype=torch.uint8), "b": torch.zeros(2 * CHUNK, dtype=torch.uint8)}
    path = tmp_path / "s"
    holdfast.save(state, path)
    file = next(path.glob("*.safetensors"))
    manifest = json.loads(next(path.glob("rank-*")).read_text())
    for at in range(PAGE, file.stat().st_size, CHUNK // 2):
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(b"\x10")
        report = holdfast.verify(path)
        assert report["verdict"] == "corrupt" and report["faults_total"] == 1
        fault = report["faults"][0]
        assert fault["file"] == file.name and fault["begin"] <= at < fault["end"] <= fault["begin"] + CHUNK
        (tensor,) = [t["name"] for t in manifest["tensors"] if t["begin"] <= at < t["end"]]
        assert fault["tensor"] == tensor
        with pytest.raises(holdfast.Error, match=tensor) as error:
            holdfast.load(path)
        assert error.value.code == "DATA_LOSS"
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(b"\0")
    assert holdfast.verify(path)["verdict"] == "sound"


def records(checked: Checked, name: str) -> Iterator[tuple[str, int, int]]:
    """Name, begin and end of each record of the zip archives in a file, which have a CRC32."""
    data = checked.files[name]
    archives = [(0, len(data))]
    if name.endswith(".distcp"):
        places = FileSystemReader(checked.path).read_metadata().storage_data.values()
        archives = [(place.offset, place.length) for place in places]
    for begin, length in archives:
        for info in zipfile.ZipFile(io.BytesIO(data[begin : begin + length])).infolist():
            header = begin + info.header_offset
            at = header + 30 + sum(struct.unpack_from("<2H", data, header + 26))
            yield info.filename, at, at + info.file_size


@pytest.mark.parametrize("format", ["torch.save", "stock dcp"])
def test_a_bit_in_every_record_without_digests(format: str, tmp_path: Path) -> None:
    """What another program's files prove of themselves."""
    checked = Checked(format, tmp_path, state_of)
    name, data = max(checked.files.items(), key=lambda item: len(item[1]))
    tensors = 0
    for record, begin, end in records(checked, name):
        tensors += "/data/" in record
        for at in (begin, (begin + end) // 2, end - 1):
            with checked.patched(name, {at: bytes([data[at] ^ 1])}):
                assert checked.escapes(f"{record}, byte {at}") == []
                assert checked.report["verdict"] == "corrupt" and checked.report["faults_total"] == 1
                (fault,) = checked.report["faults"]
                assert (fault["file"], fault["tensor"], fault["reason"]) == (name, record, "crc32")
                assert fault["begin"] <= at < fault["end"]
    assert tensors >= len(state_of(0))


def sealed(text: str) -> bytes:
    """The text with the self-digest that belongs to it."""
    head = text[: text.rindex('"self_digest"')] + '"self_digest":"'
    data = ctypes.create_string_buffer(head.encode(), len(head.encode()))
    # In xxHash's canonical order.
    digest = _native.digest(ctypes.addressof(data), len(data))
    hexadecimal = digest[7::-1].hex() + digest[:7:-1].hex()
    return f'{head}{hexadecimal}"}}\n'.encode()


HOSTILE = {
    "a name that leaves": ('"name":"model-', '"name":"../model-'),
    "a name in a directory": ('"name":"model-', '"name":"a/model-'),
    "a name with a zero byte": ('"name":"model-', '"name":"\\u0000model-'),
    "no name": ('"name":"model-00000-of-00001.safetensors"', '"name":""'),
    "the directory itself": ('"name":"model-00000-of-00001.safetensors"', '"name":"."'),
    "a manifest as a file": ('"name":"model-', '"name":"rank-00000-of-00001.manifest.json","x":"'),
    "many ranks": ('"world_size":1', '"world_size":4294967295'),
    "too many ranks": ('"world_size":1', '"world_size":4294967296'),
    "another rank": ('"rank":0', '"rank":7'),
    "a huge file": ('"bytes":', '"bytes":9223372036854775807,"x":'),
    "a negative number": ('"bytes":', '"bytes":-'),
    "a fraction": ('"step":0', '"step":0.5'),
    "another chunk size": ('"chunk_bytes":4194304', '"chunk_bytes":1'),
    "a field twice": ('"rank":0', '"rank":0,"rank":0'),
    "no attempt": ('"attempt":"', '"attempt":"0'),
    "deep nesting": ('"step":0', '"step":' + "[" * 200_000),
    "a long shape": ('"shape":[', '"shape":[' + "1," * 100_000),
    "a tensor beyond the file": ('"end":', '"end":9'),
    "another dtype": ('"dtype":"F32"', '"dtype":"F64"'),
    "a format of tomorrow": ('"version":4', '"version":9'),
}


@pytest.mark.parametrize("format", ["plain", "dcp"])
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_manifests_with_the_right_digest(what: str, format: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    state = {"t": torch.ones(5)}
    FORMATS[format].make(path, state)
    (manifest,) = path.glob("rank-*")
    (record_file,) = path.glob("holdfast.commit*")
    text = manifest.read_text()
    assert sealed(text) == text.encode()
    old, new = HOSTILE[what]
    if format == "dcp":
        old, new = (each.replace("model-00000-of-00001.safetensors", "__0_0.distcp").replace("model-", "__0_") for each in (old, new))
    assert old in text
    text = text.replace(old, new, 1)
    for record in (True, False):
        # Without a record as of an earlier version, so that the manifest alone is judged.
        manifest.write_bytes(sealed(text if record else text.replace('"version":4', '"version":2')))
        if not record:
            record_file.unlink()
        verdict = verified(FORMATS[format].verify, path)["verdict"]
        if verdict == "sound":
            # Verifying does not read these fields. A plain load takes them from what the package saved; DCP's compares them.
            assert what in ("a long shape", "another dtype") and not record
            if format == "plain":
                assert torch.equal(holdfast.load(path)["t"], torch.ones(5))
                continue
        else:
            assert verdict in ("corrupt", "incomplete")
        with bounded(path), pytest.raises((holdfast.Error, CheckpointException)) as error:
            FORMATS[format].load(path, state)
        assert readers.is_own(error.value)


@pytest.mark.parametrize("format", ["plain", "dcp", "save_file"])
def test_a_checkpoint_that_is_replaced_while_it_is_read(format: str, tmp_path: Path) -> None:
    """A load gives one save's bytes, or an error. Verifying does not call it damaged."""
    like = {f"t{number}": torch.zeros(1 << 16, dtype=torch.int64) for number in range(8)}
    path = tmp_path / "s"

    def save(seed: int) -> None:
        state = {name: torch.full_like(tensor, seed) for name, tensor in like.items()}
        if format == "plain":
            holdfast.save(state, path, replace=True)
        elif format == "dcp":
            holdfast.dcp.save(state, checkpoint_id=path, no_dist=True)
        else:
            holdfast.save_file(state, path / "state.pt", wait=True)

    save(0)
    done = threading.Event()

    def replace() -> None:
        for seed in range(1, 8):
            save(seed)
        done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    mixed, loaded, verdicts = [], 0, []
    while not done.is_set():
        with contextlib.suppress(holdfast.Error, CheckpointException):
            found = FORMATS[format].load(path, like)
            loaded += 1
            seeds = {int(value) for tensor in found.values() for value in tensor.unique()}
            mixed += [seeds] if len(seeds) != 1 else []
        with contextlib.suppress(holdfast.Error):
            verdicts.append(FORMATS[format].verify(path)["verdict"])
    thread.join()
    holdfast.flush(60)
    assert not mixed and loaded
    assert set(verdicts) == {"sound"}
