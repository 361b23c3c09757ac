"""Bad input gets a clear error at the call, and loses nothing."""

from __future__ import annotations

import argparse
import fractions
import importlib.util
import inspect
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import command_line
import pytest
import torch
from small_disk import mounted
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.megatron
from holdfast import _runtime, dcp, snapshots

MIB = 1 << 20
STATE = {"t": torch.arange(1000)}


def refused(path: Any, code: str, message: str, **options: Any) -> None:
    with pytest.raises(holdfast.Error, match=message) as error:
        holdfast.save_async(STATE, path, **options)
    assert error.value.code == code


def test_paths_that_cannot_be_saved_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "directory")
    for name in ("file", "directory", "link"):
        refused(tmp_path / name, "ALREADY_EXISTS", name)
    refused(tmp_path / "file", "FAILED_PRECONDITION", "a file", replace=True)
    refused(tmp_path / "file" / "s", "FAILED_PRECONDITION", "Not a directory")
    refused("s3://bucket/run", "INVALID_ARGUMENT", "no URLs")
    refused("/", "INVALID_ARGUMENT", "name")
    assert (tmp_path / "file").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["directory", "file", "link"]


def test_a_path_with_a_zero_byte_is_refused_and_not_printed_raw(tmp_path: Path) -> None:
    path = f"{tmp_path}/st\0ep"
    calls = (lambda: holdfast.save_async(STATE, path), lambda: holdfast.load(path), lambda: holdfast.verify(path),
             lambda: holdfast.recover(path), lambda: holdfast.find_newest(path), lambda: dcp.save(STATE, checkpoint_id=path))  # fmt: skip
    for call in calls:
        with pytest.raises(holdfast.Error, match=r"st\\x00ep': no path can have a zero byte") as error:
            call()
        assert error.value.code == "INVALID_ARGUMENT" and "\0" not in str(error.value)
    assert os.listdir(tmp_path) == []


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    refused(tmp_path / "s", "INVALID_ARGUMENT", "wait, skip, fail", when_full="maybe")
    refused(tmp_path / "s", "INVALID_ARGUMENT", "32 hex digits", attempt="1234")
    with pytest.raises(holdfast.Error, match="pickle"):
        holdfast.save_async(STATE, tmp_path / "s", objects="maybe")
    before = dict(_runtime.default.options)
    for options, message in (
        ({"launcher": "rocket"}, 'launcher "rocket": there is only spawn'),
        ({"threads": "x"}, "configure: threads 'x': a whole number is expected"),
        ({"arena_bytes": "1GiB"}, "configure: arena_bytes '1GiB': a whole number of bytes is expected"),
        ({"bytes_per_second_max": 1.5}, "configure: bytes_per_second_max 1.5: a whole number of bytes is expected"),
        ({"io_priority_class": "idle"}, r"configure: io_priority_class 'idle': 0 \(none\), .* 3 \(idle\) is expected"),
        ({"cpus": 3}, "cpus = 3"),
        ({"nice": -5}, "configure: option nice = -5: must be 0 to 19"),
        ({"queue_depth": -1}, "queue_depth = -1"),
        ({"arena_bytes": 1000}, "option arena_bytes = 1000: must be at least"),
        ({"time_memory_max": "long"}, "time_memory_max 'long': a number of seconds is expected"),
        ({"time_ranks_max": 0.0, "stale_warning": False}, "time_ranks_max = 0: must be positive"),
        ({"time_liveness_max": 0.0}, "time_liveness_max = 0: must be positive"),
        ({"time_stalled_max": float("nan")}, "time_stalled_max nan: a number of seconds is expected"),
    ):
        with pytest.raises(holdfast.Error, match=message) as error:
            holdfast.configure(**options)
        assert error.value.code == "INVALID_ARGUMENT"
    assert _runtime.default.options == before and snapshots.warning, "it was taken all the same"
    holdfast.save_async(STATE, tmp_path / "s").wait(60)
    holdfast.configure(arena_bytes=0, idle_trim=None, bytes_per_second_max=4e9)
    assert _runtime.default.options["bytes_per_second_max"] == 4_000_000_000
    holdfast.configure(bytes_per_second_max=0)
    with pytest.raises(holdfast.Error, match="engine") as error:
        holdfast.verify(tmp_path / "s", engine="steam")
    assert error.value.code == "INVALID_ARGUMENT"
    shutil.rmtree(tmp_path / "s")
    assert os.listdir(tmp_path) == []


WRONG: dict[str, tuple[Any, ...]] = {
    "step": (-1, "a", 1.5, None, True), "replace": ("no", 2, None), "late": (3, "all"), "when_full": (3, None),
    "keep_last": ("x", -1, 1.5), "objects": (5,), "files": (3, ["a"]), "shard_bytes_max": ("x", -1), "rank": ("a", -1),
    "world_size": ("a",), "attempt": (5, None), "runtime": (5,), "wait": ("no", None), "pickle_protocol": (99, "x", -1),
    "threads": ("x", -1), "buffer_bytes": (3.5,), "engine": (-1,), "direct_io": ("x",), "verify": ("x",), "strict": (1,),
    "allow": (3, "x"), "timeout": ("x", True, float("nan")), "nbytes": (-1,), "name": (3,), "share_memory_with": (3,), "drain": (3,),
    "bytes_per_second": ("x", 0), "nice": (20, "x"), "format": (3,), "planner": (3, "default"), "process_group": (3,),
    "storage_writer": (3,), "storage_reader": (3,), "no_dist": ("x", None), "use_collectives": ("no",), "replicas": (3,),
    "async_checkpointer_type": ("thread",), "async_stager": (3,), "trust": ("no",), "partial": (1,), "config": (3,),
    "overwrite": ("no",), "staging_bytes_max": ("x",), "wait_for_orphans": ("x",), "promote": (1,),
}  # fmt: skip


@pytest.mark.parametrize("text", ["4GiB", "1e9", "-5"])
def test_a_size_in_the_environment_that_is_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ARENA_BYTES", text)
    refused(tmp_path / "s", "INVALID_ARGUMENT", f"HOLDFAST_ARENA_BYTES={text}: a number of bytes is expected")


def test_arguments_of_a_wrong_type_are_named(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "whole")
    checkpointer = holdfast.Checkpointer(tmp_path / "run")
    # Calls with further arguments, and which.
    calls: tuple[tuple[Callable[..., Any], str], ...] = (
        (lambda **kw: holdfast.save_async(STATE, tmp_path / "s", **kw),
         "step replace late when_full keep_last objects files shard_bytes_max rank world_size attempt runtime"),
        (lambda **kw: holdfast.save_file(STATE, tmp_path / "f", **kw),
         "step replace late when_full runtime wait pickle_protocol"),
        (lambda **kw: checkpointer.save(STATE, 3, **kw), "replace late when_full objects name"),
        (lambda **kw: holdfast.Checkpointer(tmp_path / "run", **kw),
         "keep_last replace late when_full name share_memory_with drain"),
        (lambda **kw: holdfast.Checkpointer(tmp_path / "run", format="dcp", **kw), "keep_last replace late"),
        (lambda **kw: holdfast.load(tmp_path / "whole", **kw), "rank verify strict allow threads buffer_bytes"),
        (lambda **kw: holdfast.verify(tmp_path / "whole", **kw), "threads buffer_bytes engine direct_io"),
        (holdfast.flush, "timeout"),
        (checkpointer.wait, "timeout"),
        (checkpointer.flush, "timeout"),
        (checkpointer.wait_drained, "timeout"),
        (holdfast.warm_up, "nbytes"),
        (holdfast.Drain, "keep_last bytes_per_second nice"),
        (lambda **kw: holdfast.open(tmp_path / "whole", **kw), "rank threads"),
        (lambda **kw: holdfast.newest(tmp_path, **kw), "format"),
        (lambda **kw: holdfast.find_newest(tmp_path, **kw), "format"),
        (lambda **kw: holdfast.list_checkpoints(tmp_path, **kw), "format"),
        (lambda **kw: holdfast.recover(tmp_path, **kw), "wait_for_orphans promote"),
        (lambda **kw: dcp.async_save(STATE, checkpoint_id=tmp_path / "s", **kw),
         "planner process_group storage_writer no_dist use_collectives replicas async_checkpointer_type async_stager"),
        (lambda **kw: dcp.save(STATE, checkpoint_id=tmp_path / "s", **kw), "planner process_group storage_writer no_dist replicas"),
        (lambda **kw: dcp.load(STATE, checkpoint_id=tmp_path / "s", **kw), "planner process_group storage_reader no_dist"),
        (lambda **kw: dcp.StorageReader(tmp_path / "s", **kw), "verify allow trust partial buffer_bytes threads"),
        (lambda **kw: dcp.StorageWriter(tmp_path / "s", **kw), "overwrite staging_bytes_max"),
        (dcp.Stager, "config late staging_bytes_max"),
        (lambda **kw: dcp.recover(tmp_path, **kw), "wait_for_orphans"),
    )  # fmt: skip
    for call, names in calls:
        for name in names.split():
            for value in WRONG[name]:
                with pytest.raises(holdfast.Error, match=f"{name}.*{re.escape(str(value))}.* expected") as error:
                    call(**{name: value})
                assert error.value.code == "INVALID_ARGUMENT"
    assert sorted(os.listdir(tmp_path)) == ["whole"]


def test_an_unknown_option_is_told_with_the_nearest_and_the_real_ones(tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path / "run")
    nearest = r"there is no option keeplast \(did you mean keep_last\?\); there is .*"
    for call, of_object, kind in (
        (lambda **kw: holdfast.Checkpointer(tmp_path / "run", **kw), "arena_bytes, .*drain, drain_to, .*keep_every, .*name, .*share_memory", holdfast.Error),
        (lambda **kw: holdfast.Checkpointer(tmp_path / "run", format="dcp", **kw), "late, .*process_group", holdfast.Error),
        (lambda **kw: holdfast.save(STATE, tmp_path / "s", **kw), "keep_every, .*when_full", TypeError),
    ):  # fmt: skip
        with pytest.raises(kind, match=nearest + of_object) as error:
            call(keeplast=3)
        assert "on_sealed" not in str(error.value) and "runtime" not in str(error.value)
    with pytest.raises(holdfast.Error, match=r"no option replac \(did you mean replace\?\)"):
        checkpointer.save_async(STATE, 1, replac=True)
    with pytest.raises(holdfast.Error, match="no option stale; there is .*stale_warning"):
        holdfast.configure(stale=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        ({"when_full": "block"}, "wait, skip, fail"),
        ({"objects": "maybe"}, "pickle, refuse"),
        ({"layout": "torch"}, "holdfast, hf"),
        ({"replicas": "warn"}, "per_rank, refuse"),
        ({"format": "dcp", "replicas": "per_rank"}, "warn, refuse"),
    ],
)
def test_an_option_with_fixed_values_is_checked_when_the_checkpointer_is_made(options: dict[str, Any], choices: str, tmp_path: Path) -> None:
    name, value = next(reversed(options.items()))
    with pytest.raises(holdfast.Error, match=f"Checkpointer: {name} '{value}': one of {choices} is expected") as error:
        holdfast.Checkpointer(tmp_path, **options)
    assert error.value.code == "INVALID_ARGUMENT"
    if "format" not in options:
        refused(tmp_path / "s", "INVALID_ARGUMENT", f"one of {choices} is expected", **options)


def test_a_file_is_no_directory_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("precious")
    for format in ("holdfast", "dcp"):
        with pytest.raises(NotADirectoryError, match="Checkpointer: .*file.py is a file; name a directory") as error:
            holdfast.Checkpointer(tmp_path / "file.py", format=format)
        assert isinstance(error.value, holdfast.Error) and error.value.code == "FAILED_PRECONDITION"


def test_other_values_without_effect_are_refused(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "s")
    with pytest.raises(holdfast.Error, match="storage is for a URL"):
        holdfast.load(tmp_path / "s", storage={"region": "x"})
    for name in ("wait_for_orphans", "silence_without_locks", "age_without_locks"):
        with pytest.raises(holdfast.Error, match=f"recover: {name} -1: a number of seconds from 0 is expected"):
            holdfast.recover(tmp_path, **{name: -1})
    with pytest.raises(holdfast.Error, match="recover: wait_for_orphans -1: a number of seconds from 0 is expected"):
        dcp.recover(tmp_path, -1)
    with pytest.raises(holdfast.Error, match="Drain: give_up -3.0: a number of seconds"):
        holdfast.Drain(give_up=-3.0)


def test_a_file_in_the_place_of_a_dcp_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "step-3").write_text("precious")
    for save in (
        lambda: dcp.save(STATE, checkpoint_id=tmp_path / "step-3", no_dist=True),
        lambda: holdfast.Checkpointer(tmp_path, format="dcp").save(STATE, 3, replace=True),
    ):
        with pytest.raises(CheckpointException) as error:
            save()
        (failure, _) = error.value.failures[0]
        assert isinstance(failure, NotADirectoryError)
        assert re.search("save .*step-3: a file is there; choose another name, or remove it", str(failure))
    assert (tmp_path / "step-3").read_text() == "precious"


_NOT_ASCII = r"""
import sys, holdfast, torch
for call in (
    lambda path: holdfast.save({"w": torch.ones(1)}, path),
    lambda path: holdfast.save_file({"w": torch.ones(1)}, path),
    lambda path: holdfast.load(path),
    lambda path: holdfast.verify(path),
    lambda path: holdfast.Checkpointer(path),
    lambda path: holdfast.dcp.StorageWriter(path),
):
    try:
        call(sys.argv[1] + "/x\xe9")
    except holdfast.Error as error:
        assert error.code == "INVALID_ARGUMENT" and "encoding of this process is ascii" in str(error), error
    else:
        raise AssertionError
"""


def test_a_path_that_the_encoding_of_the_process_lacks_is_told(tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", _NOT_ASCII, tmp_path], env=environment, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_what_is_no_class_is_not_allowed(tmp_path: Path) -> None:
    holdfast.save({"a": argparse.Namespace(t=1), "f": fractions.Fraction(1, 3)}, tmp_path / "s")
    dcp.save(STATE, checkpoint_id=tmp_path / "d", no_dist=True)
    loads: tuple[Callable[..., Any], ...] = (
        lambda allow: holdfast.load(tmp_path / "s", allow=allow),
        lambda allow: holdfast.load(tmp_path / "s", into={"a": None, "f": None}, allow=allow),
        lambda allow: dcp.StorageReader(tmp_path / "d", allow=allow),
    )
    for item, message in (
        (3, "allow 3: a class or"),
        (argparse, "allow <module 'argp"),
        (argparse.Namespace(), r"allow Namespace\(\)"),
        ("argparse.Namespace", "allow 'argparse.Namespace': .*, as 'argparse:Namespace'"),
        ("Fraction", "allow 'Fraction': a class or \"module:Class\" is expected"),
        ("", "allow '': a class"),
    ):
        for load in loads:
            with pytest.raises(holdfast.Error, match=message) as error:
                load([argparse.Namespace, item])
            assert error.value.code == "INVALID_ARGUMENT"
    again = holdfast.load(tmp_path / "s", allow=[argparse.Namespace, "fractions:Fraction"])
    assert again == {"a": argparse.Namespace(t=1), "f": fractions.Fraction(1, 3)}
    result = command_line.holdfast("convert", "--allow", "bogus", tmp_path / "s", tmp_path / "out.pt")
    command_line.refused(result, "allow 'bogus': a class")


def test_a_method_in_a_state_is_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for value, name in ((model.state_dict, "Module.state_dict"), (dict.fromkeys, "dict.fromkeys"), ([].copy, "list.copy")):
        message = rf"save model.now: {name} is a method; call it: {name.partition('.')[2]}\(\)"
        refused_state = {"model": {"now": value}, **STATE}
        with pytest.raises(holdfast.Error, match=message):
            holdfast.save_async(refused_state, tmp_path / "s")
        with pytest.raises(CheckpointException, match=message):
            dcp.save(refused_state, checkpoint_id=tmp_path / "d", no_dist=True)
        with pytest.raises(CheckpointException, match=message):
            holdfast.Checkpointer(tmp_path / "run", format="dcp").save(refused_state, 1)
    # A function is its name in a pickle.
    holdfast.save({"f": os.path.join, "g": len}, tmp_path / "f")
    assert holdfast.load(tmp_path / "f", allow=["posixpath:join", len])["f"] is os.path.join


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 1e10, None])
def test_a_time_out_may_be_as_long_as_one_likes(timeout: float | None, tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "run", drain_to=tmp_path / "far") as checkpointer:
        save = checkpointer.save_async(STATE, 1)
        assert save.durable.exception(timeout) is None
        save.wait(timeout)
        holdfast.save_async(STATE, tmp_path / "other")
        holdfast.flush(timeout)
        checkpointer.wait(timeout, drain=True)


# Made by the package alone, and what compares its fields by itself.
UNCHECKED = {holdfast.Error, holdfast.Save, holdfast.Drain}


def test_every_public_function_compares_its_arguments() -> None:
    for module in (holdfast, dcp):
        for name in module.__all__:
            value = getattr(module, name)
            function = value.__init__ if inspect.isclass(value) else value
            if not callable(function) or value in UNCHECKED or hasattr(function, "__wrapped__"):
                continue
            hints = typing.get_type_hints(function)
            compared = [n for n, hint in hints.items() if n != "return" and hint not in (Any, str | os.PathLike[str])]
            assert not compared, f"{module.__name__}.{name}: {compared}"


def test_a_message_shows_no_secrets(tmp_path: Path) -> None:
    for call in (lambda **kw: holdfast.load("s3://bucket/run", **kw), holdfast.Drain):
        with pytest.raises(holdfast.Error, match="storage of type str: a dict") as error:
            call(storage="key=hidden")
        assert "hidden" not in str(error.value)


def test_meta_tensors_have_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match=r"save a\.0: .*meta"):
        holdfast.save_async({"a": [torch.empty(2, device="meta")]}, tmp_path / "s")
    with pytest.raises(CheckpointException, match=r"save a\.b: a tensor on the meta device has no data; give it values"):
        dcp.async_save({"a": {"b": torch.empty(2, device="meta")}}, checkpoint_id=tmp_path / "s").result()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("begin", "left"), [(0, 0), (4, 0), (4, 16), (2, 23)])
def test_a_tensor_without_its_storage_is_refused(begin: int, left: int, tmp_path: Path) -> None:
    """Such memory is none, or of others: a parameter that FSDP has freed, here a part of a buffer."""
    part = torch.arange(8.0)[begin:]
    state = {"a": [torch.ones(3), part]}
    holdfast.save(state, tmp_path / "s")
    dcp.save(state, checkpoint_id=tmp_path / "d")
    part.untyped_storage().resize_(left)
    why = rf"its storage has {left} of the 32 bytes that it needs.*FSDP"
    with pytest.raises(holdfast.Error, match=rf"save a\.1: {why}"):
        holdfast.save(state, tmp_path / "s", replace=True)
    with pytest.raises(holdfast.Error, match=rf"a\.1: .*{why}"):
        holdfast.save_file(state, tmp_path / "f").wait()
    with pytest.raises(CheckpointException, match=rf"save a\.1: {why}"):
        dcp.save(state, checkpoint_id=tmp_path / "d")
    with pytest.raises(holdfast.Error, match=rf"save a: {why}"):
        holdfast.save({"a": part}, tmp_path / "m", layout="hf")
    assert torch.equal(holdfast.load(tmp_path / "s")["a"][1], torch.arange(8.0)[begin:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "s"]
    part.untyped_storage().resize_(32)
    holdfast.save(state, tmp_path / "s", replace=True)


@pytest.mark.parametrize("count", [256, 4096, 1 << 15])
def test_a_storage_that_was_cut_in_its_place_is_refused(count: int, tmp_path: Path) -> None:
    tensor = torch.arange(float(count))
    holdfast.save({"a": tensor}, tmp_path / "s1")
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(2 * count)  # often at the same address
    with pytest.raises(holdfast.Error, match=rf"save a: its storage has {2 * count} of the {4 * count} bytes"):
        holdfast.save({"a": tensor}, tmp_path / "s2")


class _Silent(torch.Tensor):
    """Wraps a tensor, and lets nothing look at it."""

    inner: torch.Tensor

    @staticmethod
    def of(inner: torch.Tensor) -> _Silent:
        new = torch.Tensor._make_wrapper_subclass(_Silent, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        new.inner = inner
        return new

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"no {function}")

    __torch_dispatch__ = __torch_function__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Silent.of, (vars(self)["inner"],)


def test_a_tensor_that_lets_nothing_look_at_it_is_refused_by_name_or_saved(tmp_path: Path) -> None:
    state = {"a": [1, _Silent.of(torch.arange(3.0))]}
    with pytest.raises(holdfast.Error, match=r"save a\.1: a .*_Silent lets nothing look at it: .*no .*wraps"):
        holdfast.save(state, tmp_path / "s")
    torch.save(state, tmp_path / "stock")
    holdfast.save_file(state, tmp_path / "f").wait()
    assert torch.equal(vars(torch.load(tmp_path / "f", weights_only=False)["a"][1])["inner"], torch.arange(3.0))


@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="Megatron-Core is installed")
def test_an_install_without_the_framework_is_told(caplog: pytest.LogCaptureFixture) -> None:
    holdfast.megatron.install()
    holdfast.megatron.uninstall()
    assert "neither Megatron-Core nor nvidia-resiliency-ext is installed" in caplog.text


def test_a_structure_may_change_between_saves(tmp_path: Path) -> None:
    holdfast.save_async({"a": torch.ones(3)}, tmp_path / "s1").wait(60)
    holdfast.save_async({"a": {"b": [torch.ones(3), 1]}, "c": None}, tmp_path / "s2").wait(60)
    assert holdfast.load(tmp_path / "s2")["a"]["b"][1] == 1
    with pytest.raises(holdfast.Error, match="not in the target: b"):
        holdfast.load(tmp_path / "s2", into={"a": {}, "c": 1})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    with mounted(tmp_path / "small", 24) as path:
        yield path


def test_a_full_disk_keeps_the_older_checkpoint_and_leaves_nothing(small_disk: Path) -> None:
    holdfast.save_async({"t": torch.ones(MIB)}, small_disk / "old").wait(60)
    with pytest.raises(holdfast.Error, match="model-00000.*No space left on device") as error:
        holdfast.save_async({"t": torch.ones(8 * MIB)}, small_disk / "new").wait(60)
    assert error.value.code == "RESOURCE_EXHAUSTED"
    assert error.value.errno == 28
    holdfast.flush(60)
    assert os.listdir(small_disk) == ["old"]
    assert holdfast.verify(small_disk / "old")["verdict"] == "sound"
    holdfast.save_async({"t": torch.ones(MIB)}, small_disk / "next").wait(60)


def test_a_file_size_limit_is_an_error_and_no_signal(tmp_path: Path) -> None:
    holdfast.warm_up(64 * MIB)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    holdfast.save_async(STATE, tmp_path / "warm").wait(60)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, old[1]))
        with pytest.raises(holdfast.Error, match="File too large"):
            holdfast.save_async({"t": torch.ones(4 * MIB)}, tmp_path / "s").wait(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["warm"]


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, code in ((tmp_path / "none", "NOT_FOUND"), (tmp_path / "empty", "FAILED_PRECONDITION")):
        with pytest.raises(holdfast.Error) as error:
            holdfast.load(path)
        assert error.value.code == code
    with pytest.raises(holdfast.Error) as none:
        holdfast.find_newest(tmp_path)
    assert none.value.code == "NOT_FOUND"


def test_a_partial_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    holdfast.save_async(STATE, tmp_path / "s").wait(60)
    partial = tmp_path / ("s.partial-" + "0" * 32)
    (tmp_path / "s").rename(partial)
    with pytest.raises(holdfast.Error) as error:
        holdfast.load(partial)
    assert error.value.code == "FAILED_PRECONDITION"
    assert holdfast.list_checkpoints(tmp_path) == []


def test_a_dtype_that_this_pytorch_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"scale": torch.ones(4, dtype=torch.float8_e8m0fnu)}
    holdfast.save_async(state, tmp_path / "s").wait(60)
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(holdfast.Error, match="'float8_e8m0fnu'.*newer") as error:
        holdfast.load(tmp_path / "s")
    assert error.value.code == "UNIMPLEMENTED"
