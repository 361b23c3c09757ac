"""The zip around a tensor's bytes is what torch.save, zipfile and torch.load know."""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from holdfast._framing import ALIGNMENT
from holdfast.dcp.framing import can_frame, frame
from holdfast.dcp.records import NotPlain, find_tensor

# Quantized ones are another kind of tensor; of those below a byte torch.save knows no storage.
DTYPES = sorted(
    {
        dtype
        for name in dir(torch)
        if isinstance(dtype := getattr(torch, name), torch.dtype)
        and not re.fullmatch(r"torch\.(q.*|bits[124]x.*|u?int[1-7])", str(dtype))
    },
    key=str,
)
SHAPES = [(), (1,), (0,), (3, 0, 2), (5,), (2, 3, 4), (1, 7, 1), (0, 0)]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def item_of(tensor: torch.Tensor) -> bytes:
    framed = frame(tensor.dtype, tuple(tensor.shape))
    data = bytes_of(tensor)
    tail = bytearray(framed.tail)
    for offset in framed.crc32_offsets:
        tail[offset : offset + 4] = struct.pack("<I", zlib.crc32(data))
    item = framed.head + data + bytes(tail)
    assert len(item) == framed.length
    return item


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_is_loaded_by_torch_and_checked_by_zipfile(
    dtype: torch.dtype,
) -> None:
    for shape in SHAPES:
        tensor = tensor_of(dtype, shape)
        assert can_frame(tensor)
        item = item_of(tensor)
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            assert archive.testzip() is None
            description = archive.read("archive/data.pkl")
        loaded = torch.load(io.BytesIO(item), weights_only=True)
        assert loaded.dtype == dtype
        assert loaded.shape == tensor.shape
        assert loaded.stride() == tensor.stride()
        assert bytes_of(loaded) == bytes_of(tensor)
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        with zipfile.ZipFile(buffer) as archive:
            assert description == archive.read(archive.namelist()[0])


def test_the_bytes_begin_at_a_multiple_of_the_alignment() -> None:
    for shape in SHAPES:
        assert len(frame(torch.float32, shape).head) % ALIGNMENT == 0


def test_a_long_shape_makes_a_large_header_that_is_still_aligned() -> None:
    tensor = torch.arange(4.0).reshape((1,) * 60 + (2, 2))
    item = item_of(tensor)
    assert torch.equal(torch.load(io.BytesIO(item), weights_only=True), tensor)
    assert len(frame(tensor.dtype, tuple(tensor.shape)).head) % ALIGNMENT == 0


@pytest.mark.parametrize("elements", [(1 << 32) - 1, 1 << 32, (1 << 32) - 2048, 5 << 30])
def test_sizes_beyond_4_gib_use_zip64(elements: int, tmp_path: Path) -> None:
    framed = frame(torch.uint8, (elements,))
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.write(framed.head)
        file.seek(len(framed.head) + elements)
        file.write(framed.tail)
    with zipfile.ZipFile(path) as archive:
        (data,) = [i for i in archive.infolist() if i.filename == "archive/data/0"]
        assert data.file_size == elements
        assert archive.read("archive/version") == b"3\n"
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded.shape == (elements,)
    assert loaded[-1] == 0
    with open(path, "rb") as file:

        def read(offset: int, nbytes: int) -> bytes:
            file.seek(offset)
            return file.read(nbytes)

        record = find_tensor(read, framed.length)
    assert (record.begin, record.end) == (len(framed.head), len(framed.head) + elements)


def test_a_wrong_checksum_is_found_by_zipfile() -> None:
    item = bytearray(item_of(torch.arange(100.0)))
    item[len(frame(torch.float32, (100,)).head) + 5] ^= 1
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        assert archive.testzip() == "archive/data/0"


def test_what_torch_saves_in_another_way_is_not_framed() -> None:
    assert not can_frame(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    assert not can_frame(torch.ones(3).to_sparse())
    assert not can_frame(torch.ones(3, dtype=torch.complex64).conj())
    assert not can_frame(torch.nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 5).t(),
        torch.randn(10)[3:],
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.float8_e5m2),
        torch.ones(4, dtype=torch.int32).to(torch.uint16),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
)
def test_a_tensor_is_found_in_what_torch_saved(tensor: torch.Tensor) -> None:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    item = buffer.getvalue()
    record = find_tensor(lambda offset, nbytes: item[offset : offset + nbytes], len(item))
    assert record.dtype == tensor.dtype
    assert record.shape == tuple(tensor.shape)
    assert record.stride == tensor.stride()
    if tensor.numel():
        raw = bytearray(item[record.begin : record.end])
        whole = torch.frombuffer(raw, dtype=tensor.dtype)
        found = whole.as_strided(record.shape, record.stride, record.storage_offset)
        assert bytes_of(found) == bytes_of(tensor)


class _Other(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch._neg_view(torch.ones(2)),
        torch._neg_view(torch.ones(4, dtype=torch.int32).to(torch.uint16)),
        torch.ones(3).as_subclass(_Other),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.ones(3).to_sparse(),
        torch.ones(3, 3).to_sparse_csr(),
        torch.ones(3, device="meta"),
    ],
)
def test_what_is_more_than_its_stored_elements_is_left_to_torch(tensor: torch.Tensor) -> None:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    item = buffer.getvalue()
    with pytest.raises(NotPlain):
        find_tensor(lambda offset, nbytes: item[offset : offset + nbytes], len(item))


@pytest.mark.parametrize("seed", range(3))
def test_damaged_items_are_told_and_never_crash(seed: int) -> None:
    buffer = io.BytesIO()
    torch.save(torch.randn(20, 3), buffer)
    sound = buffer.getvalue()
    generator = torch.Generator().manual_seed(seed)
    refused = 0
    for _ in range(300):
        item = bytearray(sound)
        for _ in range(3):
            at = int(torch.randint(len(item), (), generator=generator))
            item[at] = int(torch.randint(256, (), generator=generator))
        try:
            record = find_tensor(lambda o, n, i=bytes(item): i[o : o + n], len(item))
            assert 0 <= record.begin <= record.end <= len(item)
        except (NotPlain, Exception) as error:
            assert type(error).__name__ in ("NotPlain", "Error"), error
            refused += 1
    assert refused
