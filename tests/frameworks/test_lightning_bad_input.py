"""Bad input to `holdfast.lightning.CheckpointIO`: a clear error, the older checkpoint stays, and the next save works."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import files
from holdfast.lightning import CheckpointIO

STATE = {"state_dict": {"w": torch.arange(4.0)}, "global_step": 3}
OLD = {"state_dict": {"w": torch.full((4,), 7.0)}, "global_step": 2}


@pytest.fixture
def at(tmp_path: Path) -> Path:
    """A directory with an older checkpoint, a file and a directory that are none."""
    plugin = CheckpointIO()
    plugin.save_checkpoint(OLD, tmp_path / "old.ckpt")
    plugin.teardown()
    (tmp_path / "file").write_text("precious")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "file").write_text("precious")
    return tmp_path


def nothing_is_lost(at: Path) -> None:
    """The directory is as `at` has made it."""
    (manifest,) = files.manifests_of(at / "old.ckpt")
    assert sorted(os.listdir(at)) == sorted(["directory", "file", "old.ckpt", os.path.basename(manifest)])
    assert holdfast.verify(at / "old.ckpt")["verdict"] == "sound"
    assert torch.equal(torch.load(at / "old.ckpt")["state_dict"]["w"], OLD["state_dict"]["w"])  # type: ignore[index]
    for precious in (at / "file", at / "directory" / "file"):
        assert precious.read_text() == "precious"


LOCK = {"state_dict": {}, "callbacks": {"a": threading.Lock()}}


@pytest.mark.parametrize(
    ("path", "state", "options", "kind", "said"),
    [
        ("file/below.ckpt", STATE, None, NotADirectoryError, r"/file: Not a directory"),
        ("directory", STATE, None, holdfast.Error, r"save .*/directory: directory: it is a directory; a save replaces files alone"),
        ("new/", STATE, None, ValueError, r"save .*/new/: the name of a file is expected"),
        ("n" * 300, STATE, None, ValueError, r"checkpoint name .*: is longer than \d+ bytes"),
        ("/", STATE, None, ValueError, r"save /: the name of a file is expected"),
        ("/sys/a.ckpt", STATE, None, PermissionError, r"save /sys/a.ckpt: create .*: (Permission denied|Read-only)"),
        (b"", STATE, None, ValueError, r"save '': the path is empty"),
        (None, STATE, None, ValueError, r"save None: the path of a checkpoint is expected"),
        (5, STATE, None, ValueError, r"save 5: the path of a checkpoint is expected"),
        ("nowhere://bucket/a", STATE, None, ValueError, r"save nowhere://bucket/a: fsspec has no file system for it: Protocol not known"),
        ("http://127.0.0.1:9/a", STATE, None, holdfast.Error, r"save http://127.0.0.1:9/a: fsspec's HTTPFileSystem only reads"),
        ("memory://a/b", STATE, 5, ValueError, r"save memory://a/b: storage_options = 5: a dict is expected"),
        ("old.ckpt", STATE, {"a": 1}, TypeError, r"save .*/old.ckpt: storage_options are for URLs; a local file has none"),
        ("old.ckpt", LOCK, None, ValueError, r"save old.ckpt: callbacks.a: a lock cannot be pickled: cannot pickle '_thread.lock' object"),
    ],
)  # fmt: skip
def test_a_bad_save_is_refused_with_reason(path: Any, state: Any, options: Any, kind: type, said: str, at: Path) -> None:
    plugin = CheckpointIO()
    if isinstance(path, str) and not path.startswith("/") and "://" not in path:
        path = f"{at}/{path}"
    with pytest.raises(kind, match=said):
        plugin.save_checkpoint(state, path, options)
        plugin.teardown()
    plugin.teardown()  # its error was raised
    nothing_is_lost(at)
    plugin.save_checkpoint(STATE, os.fsencode(at / "old.ckpt"))
    plugin.teardown()
    assert holdfast.verify(at / "old.ckpt")["verdict"] == "sound"
    assert torch.load(at / "old.ckpt")["global_step"] == 3


def test_a_tensor_without_data_is_saved_as_torch_saves_it(at: Path) -> None:
    plugin = CheckpointIO()
    plugin.save_checkpoint({"w": torch.empty(3, device="meta")}, at / "meta.ckpt")
    plugin.teardown()
    assert torch.load(at / "meta.ckpt")["w"].is_meta


def test_a_spool_that_is_none_is_named(at: Path) -> None:
    plugin = CheckpointIO(spool=at / "file")
    with pytest.raises(holdfast.Error, match="save memory://a/b: make a directory in the spool .*/file: File exists"):
        plugin.save_checkpoint(STATE, "memory://a/b")
    nothing_is_lost(at)
    plugin.save_checkpoint(STATE, at / "old.ckpt")
    plugin.teardown()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bytes_a_minute": 3}, "there is no option bytes_a_minute; there is .*bytes_per_second_max"),
        ({"threads": "x"}, "threads 'x': a whole number is expected"),
        ({"saves_in_flight_max": 0}, "saves_in_flight_max = 0: a number of 1 or more is expected"),
        ({"saves_in_flight_max": "x"}, "saves_in_flight_max = 'x': a number of 1 or more is expected"),
        ({"durable_names": "hpc_*"}, r"durable_names = 'hpc_\*': patterns are expected, in a list or a tuple"),
        ({"durable_names": 3}, "durable_names = 3: patterns are expected"),
        ({"durable_names": (3,)}, r"durable_names = \(3,\): patterns are expected"),
        ({"spool": 3}, "spool = 3: the path of a directory is expected"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(holdfast.Error, match=f"CheckpointIO: .*{said}|{said}") as raised:
        CheckpointIO(**options)
    assert raised.value.code == "INVALID_ARGUMENT"


def test_a_load_of_what_is_no_checkpoint_names_it(at: Path) -> None:
    plugin = CheckpointIO()
    data = (at / "old.ckpt").read_bytes()
    (at / "half.ckpt").write_bytes(data[: len(data) // 2])
    (at / "empty.ckpt").touch()
    holdfast.save_async({"w": torch.ones(3)}, at / "sharded").wait(60)
    for name, kind, said in (
        ("half.ckpt", RuntimeError, "failed finding central directory"),
        ("empty.ckpt", EOFError, ""),
        ("file", Exception, "Weights only load failed"),
    ):
        with pytest.raises(kind, match=said) as raised:
            plugin.load_checkpoint(at / name, weights_only=True)
        note = f"load {at / name}: torch.load does not read it; `holdfast verify {at / name}` says whether it is whole"
        assert raised.value.__notes__ == [note]
    for name in ("directory", "sharded"):
        with pytest.raises(IsADirectoryError, match=f"load {at / name}: it is a directory; a sharded checkpoint is loaded by"):
            plugin.load_checkpoint(at / name)
    with pytest.raises(FileNotFoundError, match="none.ckpt"):
        plugin.load_checkpoint(at / "none.ckpt")
    with pytest.raises(ValueError, match="load None: the path of a checkpoint is expected"):
        plugin.load_checkpoint(None)
    with pytest.raises(FileNotFoundError, match=r"link .*/last.ckpt to .*/none.ckpt: No such file"):
        plugin.link_checkpoint(at / "none.ckpt", at / "last.ckpt")
        plugin.teardown()
    plugin.remove_checkpoint(at / "none.ckpt")  # one that is gone is no error
    plugin.teardown()
    assert torch.equal(plugin.load_checkpoint(at / "old.ckpt")["state_dict"]["w"], OLD["state_dict"]["w"])  # type: ignore[index]
