"""The other side of reference_library_test: what the reference safetensors library reads and writes.

    reference_library.py read FILE     a line per tensor: name in hex, dtype, shape, length, CRC-32 of the bytes
    reference_library.py write FILE    tensors whose bytes follow from their names
    reference_library.py train FILE    a model and its optimizer's state after a few steps of training (with PyTorch)
"""

import sys
import zlib

import numpy
import safetensors
import safetensors.numpy


def read(path):
    with open(path, "rb") as file:
        tensors = safetensors.deserialize(file.read())
    for name, tensor in sorted(tensors):
        shape = "x".join(str(extent) for extent in tensor["shape"]) or "-"
        data = bytes(tensor["data"])
        print(name.encode().hex(), tensor["dtype"], shape, len(data), zlib.crc32(data))


def write(path):
    tensors = {}
    for dtype in ("bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64"):
        count = 3 * 5
        tensors[f"каждый.{dtype}"] = (numpy.arange(count) % 2).reshape(3, 5).astype(dtype)
    tensors["scalar"] = numpy.array(7, dtype="int64")
    tensors["empty"] = numpy.zeros((0, 4), dtype="float32")
    tensors["large"] = numpy.arange(3_000_000, dtype="float32")
    safetensors.numpy.save_file(tensors, path, metadata={"made": "by the reference library"})


def train(path):
    import safetensors.torch
    import torch

    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        batch = torch.randn(4, 16, 64)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in state.items()}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    {"read": read, "write": write, "train": train}[sys.argv[1]](sys.argv[2])
