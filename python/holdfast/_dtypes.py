"""Names of dtypes: torch's own, and those of safetensors, which stand in files and manifests."""

from __future__ import annotations

import torch

from holdfast.errors import Error

_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


def torch_name(dtype: torch.dtype) -> str:
    """``torch.float32`` is ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name that `torch_name` gave.

    Raises:
        Error: UNIMPLEMENTED if this PyTorch lacks it.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Error(
            "UNIMPLEMENTED",
            f"load a tensor of dtype {name!r}: this PyTorch ({torch.__version__}) has none; load it with a "
            "newer one",
        )
    return dtype


def file_name(dtype: torch.dtype) -> str:
    """safetensors' name; for dtypes that it lacks torch's, upper case (kept as bytes)."""
    name = torch_name(dtype)
    return _SAFETENSORS.get(name, name.upper())


def of_file(name: str) -> torch.dtype:
    """The dtype that `file_name` named so."""
    for own, theirs in _SAFETENSORS.items():
        if theirs == name:
            return torch_dtype(own)
    return torch_dtype(name.lower())
