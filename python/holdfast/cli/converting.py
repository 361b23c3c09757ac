"""``holdfast convert``: between plain Holdfast checkpoints, DCP, torch.save zips and safetensors."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from holdfast import directories
from holdfast._durable import sync_directory
from holdfast.cli import sources, text
from holdfast.errors import Error, of_system

_DESCRIPTION = """\
Converts a checkpoint or file into another format. The source is verified first, and the result is
read back and compared, entry by entry. Large tensors are in pages of files, so that a state may be
larger than the memory: the conversion needs free space for twice the state beside DST. Needs PyTorch.
"""
_EPILOG = """\
formats, each as SRC and as DST:
  holdfast      a plain checkpoint: a directory
  dcp           PyTorch Distributed Checkpoint: a directory; keys of dicts become text
  torch         a torch.save zip: .pt, .pth, .bin, .ckpt; read with weights_only
  safetensors   one file: tensors only; tied tensors are stored several times

examples:
  holdfast convert model.pt first/step-0             # torch.save to a plain checkpoint
  holdfast convert run/dcp-100 first/step-100        # DCP to a plain checkpoint
  holdfast convert --to dcp run/step-100 other/dcp-100
  holdfast convert --tensors-only run/step-100 model.safetensors

The directory of DST must exist, and hold no checkpoint of DST's format: a run that is started there
would resume from the result as the newest one.

exit status: 0 converted and compared, 2 trouble: then nothing was written to DST
"""
_FORMATS = ("holdfast", "dcp", "torch", "safetensors")
_OF_SUFFIX = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")}
_ARENA_BYTES = 256 << 20
_ENDING_SECONDS = 10.0
# What every version of the safetensors library reads; C64 came later.
_DTYPES = frozenset("BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 I16 U16 F16 BF16 I32 U32 F32 I64 U64 F64".split())


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("source", metavar="SRC", help="a checkpoint or file")
    parser.add_argument("destination", metavar="DST", help="a path where nothing is yet")
    parser.add_argument("--to", choices=_FORMATS, help="format of DST (default: by its suffix, else holdfast)")
    parser.add_argument("--rank", type=int, help="whose state to convert, where several ranks have saved; default what all ranks had alike")
    parser.add_argument("--step", type=int, help="step to record (default: that of SRC, else 0)")
    parser.add_argument("--tensors-only", action="store_true", help="leave out what is no tensor; DST has one dict with the names that `holdfast show` prints")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="a class that objects of SRC may be made of",
    )


def run(arguments: argparse.Namespace) -> int:
    for path in (arguments.source, arguments.destination):
        if any("\udc80" <= c <= "\udcff" for c in path):  # PyTorch maps no file of such a name
            raise Error("INVALID_ARGUMENT", f"convert {path}: not UTF-8; rename it")
    target = directories.absolute_path(directories.local_path(arguments.destination, "convert"), "convert")
    kind = arguments.to or _OF_SUFFIX.get(os.path.splitext(target)[1], "holdfast")
    sources.scratch_directory = os.path.dirname(target)
    if not os.path.isdir(sources.scratch_directory):
        raise Error("NOT_FOUND", f"convert to {target}: its directory does not exist; make it first")
    _check_free(target, kind)
    source = sources.open_source(arguments.source)
    if arguments.rank is not None and not source.has_ranks:
        raise Error("INVALID_ARGUMENT", f"convert {source.path}: no rank has a part of its own there; leave --rank out")
    _verify(source.path)
    with _own_options():
        state = (
            source.tensors(arguments.rank) if arguments.tensors_only else source.state(arguments.rank, arguments.allow)
        )
    _check(state, kind)
    step = arguments.step if arguments.step is not None else source.facts.get("step", 0)
    further = source.files()
    with _beside(target) as written:
        if kind == "holdfast":
            _holdfast(state, written, step, source.contents(), source.layout)
        else:
            _WRITERS[kind](state, written, step)
        result = sources.open_source(written)
        _compare(state, result.state(0 if kind == "holdfast" else None, arguments.allow), target)
        if kind == "holdfast" and result.files() != further:
            raise Error("DATA_LOSS", f"convert to {target}: its further files are not as in the source; please report this")
        _check_free(target, kind)
    if further and kind != "holdfast":
        _note(target, f"the further files {', '.join(further)}, which {kind} does not hold")
    if kind == "dcp" and (empty := list(_empty_dicts(state))):
        _note(target, f"the empty dicts {', '.join(empty)}, which DCP does not store")
    nbytes = sum(leaf.numel() * leaf.itemsize for _, leaf in sources.leaves(state) if _is_tensor(leaf))
    text.lines([f"{target}: {kind}, {text.size(nbytes)} of tensors; read back and compared"])
    return 0


def _note(target: str, left_out: str) -> None:
    print(text.printable(f"holdfast convert: {target} lacks {left_out}"), file=sys.stderr)


def _empty_dicts(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The names of empty dicts in what DCP's planner flattens."""
    if isinstance(value, dict) and not value:
        yield ".".join(path)
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _empty_dicts(item, (*path, str(key)))


@contextlib.contextmanager
def _own_options() -> Iterator[None]:
    """Names the option of this command in the place of Python's argument."""
    try:
        yield
    except Error as error:
        message = re.sub(
            r"allow=\[(.*)\]", lambda m: "--allow " + m[1].replace("'", "").replace(",", " --allow"), error.message
        )
        raise Error(error.code, message, error.errno) from error


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _verify(path: str) -> None:
    report = directories.verify(path)
    if report["verdict"] != "sound":
        fault: dict[str, Any] = next(iter(report["faults"]), {})
        reason = f"{fault.get('file')}: {fault.get('reason')}" if fault else "no reason"
        raise Error(
            "DATA_LOSS",
            f"convert {path}: it is {report['verdict']} ({reason}); `holdfast verify {path}` lists all faults",
        )


# ---- What a format cannot hold.


def _check(state: Any, kind: str) -> None:
    """Raises an error that names what `kind` cannot hold."""
    if kind in ("dcp", "safetensors") and not isinstance(state, dict):
        raise Error("INVALID_ARGUMENT", f"convert: the state is a {type(state).__name__}, and {kind} holds dicts alone")
    import torch

    from holdfast import _plain
    from holdfast._tensor_kinds import NESTED, QUANTIZED

    seen = set()
    for name, leaf in sources.leaves(state):
        if kind in ("dcp", "safetensors"):  # Holdfast tells of it, and torch.save takes it
            _plain.check_text(name, f"convert {name}")
        reason = ""
        if _is_tensor(leaf) and leaf.is_quantized:
            reason = QUANTIZED
        elif _is_tensor(leaf) and leaf.is_nested and leaf.layout == torch.strided:
            reason = NESTED
        elif kind == "safetensors":
            reason = _not_in_safetensors(leaf)
        elif kind == "torch":
            reason = _not_for_weights_only(leaf)
        if name in seen and kind in ("dcp", "safetensors"):
            reason = sources.TWICE
        seen.add(name)
        if reason:
            raise Error("INVALID_ARGUMENT", f"convert {name}: {reason}")


def _not_in_safetensors(leaf: Any) -> str:
    import torch

    from holdfast import _dtypes
    from holdfast._tensor_kinds import why_no_data

    if not _is_tensor(leaf):
        return (
            f"a {type(leaf).__name__} is no tensor, and safetensors holds tensors alone; --tensors-only leaves it out"
        )
    if leaf.layout != torch.strided or type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(leaf).__name__} of layout {leaf.layout} is not an ordinary tensor"
    if _dtypes.file_name(leaf.dtype) not in _DTYPES:
        return f"safetensors has no dtype {leaf.dtype}"
    return why_no_data(leaf) or ""


def _not_for_weights_only(leaf: Any) -> str:
    import torch

    if _is_tensor(leaf) or type(leaf) in (type(None), bool, int, float, str):
        return ""
    buffer = io.BytesIO()
    try:
        torch.save(leaf, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # of any kind: the class's own code runs
        return f"torch.load(weights_only=True) does not read a {type(leaf).__module__}.{type(leaf).__qualname__}"
    return ""


# ---- The result is what the source was.


def _compare(before: Any, after: Any, path: str) -> None:
    old, new = _by_name(before), _by_name(after)
    for name in {**old, **new}:
        ours, theirs = old.get(name, []), new.get(name, [])
        if len(ours) != len(theirs) or not all(map(_same, ours, theirs)):
            raise Error("DATA_LOSS", f"convert to {path}: {name} is not as in the source; please report this")


def _by_name(state: Any) -> dict[str, list[Any]]:
    """The entries of each name: of the keys 0 and "0" there are two."""
    found: dict[str, list[Any]] = {}
    for name, leaf in sources.leaves(state):
        found.setdefault(name, []).append(leaf)
    return found


def _same(a: Any, b: Any) -> bool:
    from holdfast.cli import exact
    from holdfast.cli.framework_sources import same

    if _is_tensor(a) and _is_tensor(b):
        return same(a, b)
    return exact.text(a) == exact.text(b)


# ---- Where the result goes.


def _exists(target: str) -> Error:
    return Error("ALREADY_EXISTS", f"convert to {target}: it exists already; choose another name, or remove it")


def _check_free(target: str, kind: str) -> None:
    """Refuses a name that is taken, and a directory with checkpoints of the format: the result would be the newest of the run."""
    if os.path.lexists(target):
        raise _exists(target)
    if kind not in ("holdfast", "dcp"):
        return
    there: list[dict[str, Any]] = []
    with contextlib.suppress(Error):  # none is complete, and one cannot be read
        there = directories.list_checkpoints(os.path.dirname(target), format=kind)
    if there:
        raise Error(
            "FAILED_PRECONDITION",
            f"convert to {target}: its directory has checkpoints of this format ({there[-1]['name']}), and a run would resume from "
            "the result as the newest one; choose a directory without such checkpoints",
        )


@contextlib.contextmanager
def _beside(target: str) -> Iterator[str]:
    """Gives a path to write to, in a new directory beside `target`; what is there at the end gets the name `target` if that is free."""
    above, name = os.path.split(target)
    # From here on an interruption has something to remove; it comes once it can be.
    early: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: early.append(number))
    with of_system(f"convert to {target}: make a directory beside it"):
        own = tempfile.mkdtemp(prefix=".holdfast-convert-", dir=above)
    written = os.path.join(own, name)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if early:
            raise KeyboardInterrupt
        yield written
        with of_system(f"convert to {target}"):
            try:
                # Neither replaces anything but an empty directory.
                (os.rename if os.path.isdir(written) else os.link)(written, target)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise _exists(target) from error
                raise
            sync_directory(above)
    except Error as error:
        raise Error(error.code, error.message.replace(written, target), error.errno) from error
    finally:
        end = time.monotonic() + _ENDING_SECONDS
        while os.path.lexists(own) and time.monotonic() < end:  # a worker whose save was interrupted may still write there
            shutil.rmtree(own, ignore_errors=True)


# ---- Writing.


def _holdfast(state: Any, path: str, step: int, files: dict[str, bytes], layout: Any) -> None:
    import holdfast

    holdfast.configure(arena_bytes=_ARENA_BYTES)
    # Alone, whatever a launcher has put into the environment.
    save = holdfast.save_async(state, path, step=step, files=files, layout=layout, rank=0, world_size=1)
    try:
        save.wait()
    except BaseException:
        save.cancel()
        save.durable.exception()  # until then it may still write
        raise


def _dcp(state: Any, path: str, step: int) -> None:
    import torch.distributed.checkpoint as dcp

    import holdfast
    from holdfast.cli.framework_sources import framework_errors
    from holdfast.dcp import StorageWriter

    holdfast.configure(arena_bytes=_ARENA_BYTES)
    with framework_errors(f"save {path}"):
        dcp.save(state, storage_writer=StorageWriter(path, step=step), no_dist=True)


def _file(path: str, write: Callable[[Any], None]) -> None:
    with of_system(f"write {path}"), open(path, "xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _torch(state: Any, path: str, step: int) -> None:
    import torch

    _file(path, lambda file: torch.save(state, file))


def _safetensors(state: Any, path: str, step: int) -> None:
    _file(path, lambda file: _write_safetensors(state, file))


def _write_safetensors(state: Any, file: Any) -> None:
    from holdfast import _dtypes
    from holdfast._tensor_kinds import in_memory

    # Larger elements first: so each tensor is aligned.
    tensors = sorted(sources.leaves(state), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        dtype = _dtypes.file_name(tensor.dtype)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for _, tensor in tensors:
        memory = in_memory(tensor)
        if memory.nbytes:
            file.write((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))


_WRITERS = {"dcp": _dcp, "torch": _torch, "safetensors": _safetensors}
