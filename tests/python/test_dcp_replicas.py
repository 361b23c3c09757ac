"""Of what several ranks have under one name a DCP checkpoint holds one value: where theirs differ, a save says so."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
import holdfast.dcp
from holdfast.dcp import replicas, uploads
from holdfast.dcp.writer import StorageWriter


def state_of(rank: int, step: int, differing: tuple[str, ...] = ()) -> dict[str, Any]:
    """Of all kinds of items; `differing` names those that are each rank's own."""

    def value(name: str) -> float:
        return step + (rank + 1) / 2 * (name in differing)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "w": torch.full((300, 300), value("w")),
        "bias": torch.full((3,), value("bias")),
        "turned": torch.full((20, 30), value("turned")).t(),
        "step": value("step"),
        "config": {f"x{value('config')}"},  # an object
        "replica": DTensor.from_local(torch.full((5,), value("replica")), mesh, [Replicate()], run_check=False),
        "shard": DTensor.from_local(torch.full((5,), float(rank)), mesh, [Shard(0)], run_check=False),
        f"own{rank}": torch.full((4,), float(rank)),
        "empty": torch.empty(0),
    }  # fmt: skip


TENSORS, OBJECTS = ("w", "bias", "turned", "replica"), ("step", "config")


def report_of(state: dict[str, Any], path: str, **options: Any) -> dict[str, Any]:
    future: Any = holdfast.dcp.async_save(state, checkpoint_id=path, **options)
    future.result(60)
    return future.report


def save_each(rank: int, directory: str) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast.dcp").addHandler(handler)
    step = 0

    def report(*differing: str) -> dict[str, Any]:
        nonlocal step
        step += 1
        return report_of(state_of(rank, step, differing), f"{directory}/{step}")

    for _ in range(2):  # a planning in the call, and a known plan
        assert report().items() >= {"tensors_differing": 0, "objects_differing": 0, "differing": []}.items()
    assert not said
    for name in TENSORS + OBJECTS:
        found = report(name)
        assert found["differing"] == [name], name
        assert (found["tensors_differing"], found["objects_differing"]) == (name in TENSORS, name in OBJECTS)
    found = report(*TENSORS, *OBJECTS)
    assert (found["tensors_differing"], found["objects_differing"]) == (4, 2)
    assert set(found["differing"]) == {*TENSORS, *OBJECTS}
    # The coordinator says it, and of the same names once.
    assert len(said) == (7 if rank == 0 else 0), said
    report("w")
    assert len(said) == (7 if rank == 0 else 0)
    assert not said or "w (ranks 0 and 1)" in said[0] and "replicas='refuse'" in said[0]
    if rank == 0:
        names = dcp.FileSystemReader(f"{directory}/1").read_metadata().state_dict_metadata
        assert set(names) == {*state_of(0, 1), *(f"own{r}" for r in range(dist.get_world_size()))}
    loaded = state_of(rank, 0)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(f"{directory}/1"))  # the framework's own
    assert torch.equal(loaded["w"], state_of(rank, 1)["w"])
    assert torch.equal(loaded["shard"].to_local(), torch.full((5,), float(rank)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_ranks_do_not_have_alike_is_in_every_report(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, tmp_path, save_each, str(tmp_path))
    assert holdfast.verify(tmp_path / "1")["verdict"] == "sound"


def save_each_without_digests(rank: int, directory: str) -> None:
    replicas._native = SimpleNamespace(  # type: ignore[assignment]
        digests=lambda addresses, sizes: bytes(16 * len(sizes)), TensorTable=replicas._native.TensorTable
    )
    with pytest.raises(AssertionError, match="^w$"):
        save_each(rank, directory)


@pytest.mark.planted("digests_no_replica")
def test_the_planted_bug_digests_no_replica_and_is_found(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, save_each_without_digests, str(tmp_path))


def refuse_each(rank: int, directory: str) -> None:
    for step in (1, 2):
        holdfast.dcp.save(state_of(rank, step), checkpoint_id=f"{directory}/{step}", replicas="refuse")
    for way in ("refuse", "refuse on one rank"):
        own = "refuse" if rank == 1 or way == "refuse" else "warn"
        with pytest.raises(dcp.api.CheckpointException) as failed:
            holdfast.dcp.save(state_of(rank, 3, ("bias", "step")), checkpoint_id=f"{directory}/3", replicas=own)
        (error,) = (e for e, _ in failed.value.failures.values())
        assert error.code == "INVALID_ARGUMENT", error
        assert "1 tensor and 1 object differ" in error.message and "bias (ranks 0 and 1)" in error.message
    holdfast.dcp.save(state_of(rank, 4), checkpoint_id=f"{directory}/4", replicas="refuse")
    dist.barrier()
    assert not Path(directory, "3").exists()  # so that it is not completed afterwards either


def test_a_save_of_such_a_state_can_be_refused(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, refuse_each, str(tmp_path))


def refuse_twice(rank: int, directory: str) -> None:
    """Rank 1 begins its second save before rank 0 has ended the first one, which has made the directory."""
    path = Path(directory, "3")
    holdfast.dcp.save(state_of(rank, 1), checkpoint_id=f"{directory}/1")
    take_back = StorageWriter.take_back

    def when_files_are_there(writer: StorageWriter) -> None:
        end = time.monotonic() + 30
        while not any(path.iterdir()) and time.monotonic() < end:
            time.sleep(0.01)
        StorageWriter.take_back = take_back  # type: ignore[method-assign]
        take_back(writer)

    if rank == 0:
        StorageWriter.take_back = when_files_are_there  # type: ignore[method-assign]
    else:
        while not path.exists():
            time.sleep(0.01)
    for step in (2, 3):
        with pytest.raises(dcp.api.CheckpointException, match="differ"):
            holdfast.dcp.save(state_of(rank, step, ("bias",)), checkpoint_id=path, replicas="refuse")
    dist.barrier()
    assert not path.exists()


def test_the_directory_of_refused_saves_goes_with_the_last_one(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, refuse_twice, str(tmp_path))


def change_structure(rank: int, directory: str) -> None:
    """Ranks that find another structure write all that they have; that is compared, too."""
    report_of(state_of(rank, 1), f"{directory}/1")
    state = {**state_of(rank, 2), "new": torch.full((3,), float(rank)), "alike": torch.ones(2)}
    for step in (2, 3):
        assert report_of(state, f"{directory}/{step}")["differing"] == ["new"]
    # One rank alone has something anew, which another one has had before.
    report_of({**state_of(rank, 4), **({"late": torch.ones(1)} if rank == 0 else {})}, f"{directory}/4")
    for step in (5, 6):
        late = torch.full((1,), float(rank))
        assert report_of({**state_of(rank, 5), "late": late}, f"{directory}/{step}")["differing"] == ["late"]
    with pytest.raises(dcp.api.CheckpointException):
        options: Any = {"replicas": "refuse"}
        holdfast.dcp.save({**state_of(rank, 7), "x": torch.full((1,), rank)}, checkpoint_id=f"{directory}/7", **options)
    holdfast.dcp.save({**state_of(rank, 8), "x": torch.ones(1)}, checkpoint_id=f"{directory}/8", replicas="refuse")


def test_a_state_of_another_structure_is_compared(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, change_structure, str(tmp_path))


def newly_shared(rank: int, directory: str) -> None:
    """In the second save rank 1 has what rank 0 alone had in the first: that is compared in the file of rank 0."""

    def state(has: bool, own: str = "") -> dict[str, Any]:
        late = {
            "tensor": torch.arange(5.0), "empty": torch.empty(0), "turned": torch.arange(12.0).reshape(3, 4).t(),
            "object": ("x", 1), "conj": torch.full((2,), 2j).conj(), "plain": 2.5,
        }  # fmt: skip
        if own:
            late[own] = ("x", 2) if own == "object" else late[own] + rank  # type: ignore[operator]
        return {"w": torch.ones(3), **(late if has else {}), f"own{rank}": torch.ones(1)}

    for number, own in enumerate(("", "tensor", "object", "plain")):
        for way in ("known", "refuse", "recover", "too large"):
            path = f"{directory}/{number} {way}"
            # Another name in each pass, so that no plan of the passes before is known.
            more = {f"{number} {way}": torch.ones(1)}
            before = {**state(rank == 0), **more}
            holdfast.dcp.save(before, checkpoint_id=f"{path} before", replicas="refuse")
            changed = own if rank == 1 else ""
            after = {**state(True, changed), **more}
            if way == "refuse" and own:
                error = error_of(after, path, replicas="refuse")
                assert "1 tensor and 0 objects differ" in error.message or own in ("object", "plain"), error.message
                assert f"under one name: {own} (ranks 1 and 0)" in error.message, error.message
            elif way == "recover":
                recovered_state(after, path)
                assert rank == 1 or holdfast.dcp.recover(path) == ([] if own else [".metadata"])
                dist.barrier()
            else:
                read_bytes_max = replicas._READ_BYTES_MAX
                replicas._READ_BYTES_MAX = 0 if way == "too large" else read_bytes_max
                report = report_of(after, path, replicas="warn" if own or way == "too large" else "refuse")
                replicas._READ_BYTES_MAX = read_bytes_max
                names = ["tensor", "empty", "turned", "object", "conj", "plain"] if way == "too large" else [own][: bool(own)]
                assert sorted(report["differing"]) == sorted(names), report


def recovered_state(state: dict[str, Any], path: str) -> None:
    """Saves, and loses the exchange at the end of the save."""

    def lost(*_: Any) -> Any:
        raise RuntimeError("lost")

    reduce = uploads.Exchange.reduce
    uploads.Exchange.reduce = lost  # type: ignore[method-assign]
    holdfast.dcp.async_save(state, checkpoint_id=path, replicas="refuse").exception(60)  # type: ignore[union-attr]
    uploads.Exchange.reduce = reduce  # type: ignore[method-assign]
    dist.barrier()


def test_what_one_rank_had_alone_is_compared_in_its_file(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, newly_shared, str(tmp_path))


def shapes_and_planners(rank: int, directory: str) -> None:
    class Planner(dcp.DefaultSavePlanner):
        """Plans in every call."""

    zeros = torch.zeros(8) if rank else torch.zeros(2, 4).flatten().to(torch.int32)
    assert report_of({"z": zeros}, f"{directory}/1")["differing"] == ["z"]
    for step in (2, 3):
        state = state_of(rank, step, ("turned", "step"))
        found = report_of(state, f"{directory}/{step}", planner=Planner())
        assert set(found["differing"]) == {"turned", "step"}
    cp = holdfast.Checkpointer(f"{directory}/run", format="dcp", replicas="refuse")
    cp.save(state_of(rank, 1), 1)
    with pytest.raises(dcp.api.CheckpointException):
        cp.save(state_of(rank, 2, ("w",)), 2)
    save = cp.save_async(state_of(rank, 2, ("w",)), 2, replicas="warn")
    save.wait()
    assert save.report["tensors_differing"] == 1
    cp.close()


def test_dtypes_own_planners_and_the_checkpointer(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, shapes_and_planners, str(tmp_path))


def recovered(rank: int, directory: str, ways: str) -> None:
    """Saves, and loses the exchange at the end of the save."""

    def lost(*_: Any) -> Any:
        raise RuntimeError("lost")

    reduce = uploads.Exchange.reduce
    uploads.Exchange.reduce = lost  # type: ignore[method-assign]
    try:
        state = state_of(rank, 1, ("bias",))
        holdfast.dcp.async_save(state, checkpoint_id=f"{directory}/{ways}", replicas=ways).exception(60)
    finally:
        uploads.Exchange.reduce = reduce  # type: ignore[method-assign]
    dist.barrier()


def test_a_recovery_compares_what_the_save_would_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for ways, message in (("warn", "The checkpoint has the value of one rank"), ("refuse", "and replicas='refuse'")):
        run_ranks(2, tmp_path, recovered, str(tmp_path), ways)
        caplog.clear()
        assert holdfast.dcp.recover(tmp_path / ways) == ([".metadata"] if ways == "warn" else [])
        assert message in caplog.text and "bias (ranks 0 and 1)" in caplog.text
        shutil.rmtree(tmp_path / ways)


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match="replicas is 'warn' or 'refuse', not 'never'"):
        holdfast.dcp.save({}, checkpoint_id=tmp_path / "x", replicas="never")
    writer = dcp.FileSystemWriter(tmp_path / "x")
    with pytest.raises(holdfast.Error, match="compares nothing over ranks"):
        holdfast.dcp.async_save({}, storage_writer=writer, replicas="refuse")


def error_of(state: dict[str, Any], path: str, **options: Any) -> holdfast.Error:
    with pytest.raises((dcp.api.CheckpointException, holdfast.Error)) as failed:
        holdfast.dcp.save(state, checkpoint_id=path, **options)
    if isinstance(failed.value, dcp.api.CheckpointException):
        (error,) = {str(e): e for e, _ in failed.value.failures.values()}.values()
        return error  # type: ignore[no-any-return]
    return failed.value


def mistakes_of_a_rank(rank: int, directory: str) -> None:
    class Unwilling:
        def __reduce__(self) -> Any:
            raise RuntimeError("not today") if rank == 1 else AttributeError

    mixed = {"w": torch.ones(2), "x": torch.ones(3) if rank else None}
    for path in ("planned", "known", "the other way round"):
        error = error_of(mixed, f"{directory}/{path}")
        assert error.code == "INVALID_ARGUMENT" and "x is an object on rank " in error.message, error
        if path == "known":
            mixed["x"] = None if rank else torch.ones(3)
        holdfast.dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{directory}/after {path}", replicas="refuse")
    for path in ("new", "known"):
        error = error_of({"w": torch.ones(2), "o": Unwilling() if rank else 1}, f"{directory}/object {path}")
        assert error.code == "INVALID_ARGUMENT" and "save o: it cannot be pickled (" in error.message, error
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    planner.__class__ = type("Caching", (dcp.DefaultSavePlanner,), {})
    error = error_of({"w": torch.ones(2)}, f"{directory}/cached", planner=planner, replicas="refuse")
    assert error.code == "INVALID_ARGUMENT" and "compares nothing with a planner that caches its plans" in error.message


def test_mistakes_of_a_rank_are_named(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, mistakes_of_a_rank, str(tmp_path))


TYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool, torch.complex64]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70), st.sampled_from(TYPES)), min_size=1, max_size=6), st.data())
def test_digests_made_on_a_device_show_every_change(kinds: list[tuple[int, torch.dtype]], data: st.DataObject) -> None:
    """The sums that are computed on a device, here by the CPU, in batches of a few words."""

    def digests(tensors: list[torch.Tensor]) -> list[bytes]:
        found = replicas.of_device(list(enumerate(tensors)), len(tensors), 4).numpy().tobytes()
        return [found[16 * i : 16 * i + 16] for i in range(len(tensors))]

    tensors = [torch.zeros(n, dtype=dtype) for n, dtype in kinds]
    before = digests(tensors)
    assert before == digests([t.clone() for t in tensors])
    which = data.draw(st.integers(0, len(tensors) - 1))
    memory = tensors[which].view(torch.uint8)
    if memory.numel():
        memory[data.draw(st.integers(0, memory.numel() - 1))] += data.draw(st.integers(1, 255))
        after = digests(tensors)
        assert [a == b for a, b in zip(before, after, strict=True)] == [i != which for i in range(len(tensors))]


def test_a_digest_made_on_a_device_depends_on_no_other_tensor() -> None:
    def digests(tensors: list[torch.Tensor]) -> list[bytes]:
        found = replicas.of_device(list(enumerate(tensors)), len(tensors), 4).numpy().tobytes()
        return [found[16 * i : 16 * i + 16] for i in range(len(tensors))]

    tensors = [torch.arange(n, dtype=dtype) for n, dtype in ((3, torch.int8), (40, torch.int32), (0, torch.int8), (5, torch.int64))]
    columns = torch.arange(15.0).reshape(3, 5)
    tensors += [columns[:1, 2], columns[:0, 2]]  # contiguous, with a stride of 5
    assert digests(tensors) == [digests([tensor])[0] for tensor in tensors]
    assert digests(tensors[::-1]) == digests(tensors)[::-1]


def test_large_ranges_are_digested_in_slices() -> None:
    memory = torch.arange(6 << 20, dtype=torch.int64)  # 48 MiB

    def digest() -> bytes:
        return holdfast._native.digests([memory.data_ptr()], [memory.nbytes])

    before = digest()
    assert before == digest() and len(before) == 16
    for at in (0, 2 << 20, (6 << 20) - 1):
        memory[at] += 1
        assert digest() != before
        memory[at] -= 1
    assert digest() == before
    assert holdfast._native.digests([], []) == b""
    small = torch.arange(10)
    assert holdfast._native.digests([small.data_ptr()] * 2, [80, 80]) == holdfast._native.digest(small.data_ptr(), 80) * 2
