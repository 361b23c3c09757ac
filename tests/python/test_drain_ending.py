"""A drain that is to end, as of a trainer that has ended, beside a job with other options that saves in the same places."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from draining import PLAIN, names, save, swept, until
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.drain import Drain
from holdfast.drain.following import Following, alone
from holdfast.drain.places import open_place
from holdfast.drain.running import Running

pytestmark = pytest.mark.filterwarnings("ignore")

# Of the other job: a save, one that replaces the newest, one of another node, whose drain has sent it.
LATER = st.lists(st.sampled_from(("save", "replace", "far")), max_size=6)


@settings(max_examples=20, deadline=None)
@example(1, ["far", "far"], False, 1, 0, "")  # in front of the first look at the second place
@given(st.integers(1, 3), LATER, st.booleans(), st.integers(0, 2), st.integers(0, 2), st.sampled_from(("", "step-{step}")))
def test_what_comes_later_is_neither_removed_nor_waited_for(
    before: int, later: list[str], is_once: bool, keep_last: int, keep_local: int, form: str
) -> None:
    with tempfile.TemporaryDirectory() as top:
        run, far = Path(top, "run"), Path(top, "far")
        save(run, *range(before), elements=1)
        first, second = open_place(str(run)), open_place(str(far))
        old = first.complete()[0]
        step, made, arrived = before, set[tuple[str, str, str]](), 0

        def act(what: str) -> None:
            """The other job saves; `made` has what stands then by its options, which keep all."""
            nonlocal step
            step += what != "replace" or step == before
            at = far if what == "far" else run
            save(at, step - 1, elements=1, replace=True)
            made.difference_update({key for key in made if key[:2] == (str(at), f"step-{step - 1}")})
            made.update((str(at), *c.key) for c in open_place(str(at)).complete()[0] if c.step == step - 1)

        def hear(event: dict[str, Any]) -> None:
            nonlocal arrived
            arrived += event["event"] == "arrived"
            if event["event"] == "arrived" and later:
                act(later.pop())

        following = Following(first, second, Drain(keep_last=keep_last), hear, keep_local=keep_local, form=form)
        running = Running(following, hear, watch=not is_once)
        if not is_once:
            running.finish()
            following.bind()
            for what in later[:2]:
                act(what)
        assert running.run(str(run), str(far)) is None
        there = {(str(at), *c.key) for at in (run, far) for c in open_place(str(at)).complete()[0]}
        assert made <= there
        assert arrived <= 2 * before  # of each name one more
        if not made:  # what the own options keep is there
            assert old[-1].key in {c.key for c in second.complete()[0]}


@pytest.mark.parametrize("is_listed", [True, False])
def test_what_another_node_sends_behind_the_end_stays(is_listed: bool, tmp_path: Path) -> None:
    """Its saves are of before. The second place was not looked at yet, or could not be listed."""
    run, other, far = tmp_path / "run", tmp_path / "other", tmp_path / "far"
    save(run, 1, elements=10)
    save(other, 2, 3, elements=10)
    if not is_listed:
        far.touch()
    running = Running(following := Following(open_place(str(run)), open_place(str(far)), Drain(keep_last=1), print), print, watch=True)
    running.finish()
    following.bind()
    if not is_listed:
        far.unlink()
    swept(open_place(str(other)), open_place(str(far)))
    assert running.run(str(run), str(far)) is None
    assert names(open_place(str(far))) == ["step-1", "step-2", "step-3"]


def test_a_clock_that_is_behind_keeps_nothing_from_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, far = tmp_path / "run", open_place(str(tmp_path / "far"))
    save(run, 1, 2, 3, elements=10)
    swept(open_place(str(run)), far, keep_local=1)
    save(run, 4, elements=10)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    running = Running(Following(open_place(str(run)), far, Drain(keep_last=2), print), print, watch=False)
    assert running.run(str(run), far.url) is None and names(far) == ["step-3", "step-4"]


@pytest.mark.parametrize("is_newest", [False, True], ids=["all", "newest"])
@pytest.mark.parametrize("watch", [False, True], ids=["once", "watch"])
def test_the_end_comes_beside_saves_that_are_faster(watch: bool, is_newest: bool, tmp_path: Path) -> None:
    run, far = tmp_path / "run", open_place(str(tmp_path / "far"))
    save(run, 1, 2, elements=10)
    further = iter(range(3, 7))

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "arrived":
            save(run, next(further), elements=10)

    only = (lambda complete: complete[-1:]) if is_newest else None
    running = Running(Following(open_place(str(run)), far, PLAIN, hear, only=only), hear, watch=watch)
    running.finish()
    running._bind()
    assert running.run(str(run), far.url) is None
    assert names(far) == (["step-2"] if is_newest else ["step-1", "step-2"])


def test_a_save_that_is_on_its_way_at_the_end_is_sent(tmp_path: Path) -> None:
    """As by the worker of a trainer that has ended."""
    run, far = tmp_path / "run", open_place(str(tmp_path / "far"))
    save(run, 1, elements=10)

    def of_rank(rank: int) -> Any:
        return holdfast.save_async({"w": torch.ones(10)}, run / "step-2", step=2, rank=rank, world_size=2, attempt="ab" * 16)

    first = of_rank(0)
    assert until(lambda: any("partial" in path.name for path in run.iterdir()))

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "arrived" and event["name"] == "step-1":
            of_rank(1).wait(60)
            first.wait(60)
            save(run, 3, elements=10)

    running = Running(Following(open_place(str(run)), far, PLAIN, hear), hear, watch=True)
    running.finish()
    running._bind()
    assert running.run(str(run), far.url) is None and names(far) == ["step-1", "step-2"]


@pytest.mark.parametrize("is_beside", [False, True], ids=["alone", "beside"])
def test_the_end_waits_for_a_save_that_is_on_its_way(is_beside: bool, tmp_path: Path) -> None:
    """There is nothing else to send, or another process sends it."""
    run, far = tmp_path / "run", open_place(str(tmp_path / "far"))
    save(run, 1, elements=10)
    swept(open_place(str(run)), far)

    def of_rank(rank: int) -> Any:
        return holdfast.save_async({"w": torch.ones(10)}, run / "step-2", step=2, rank=rank, world_size=2, attempt="ab" * 16)

    first = of_rank(0)
    assert until(lambda: any("partial" in path.name for path in run.iterdir()))
    following = Following(open_place(str(run)), far, PLAIN, lambda event: None)
    running = Running(following, lambda event: None, watch=True)
    running.finish()
    following.bind()
    thread = threading.Thread(target=running.run, args=(str(run), far.url), daemon=True)
    with alone(str(run), far.url, lambda: False) if is_beside else contextlib.nullcontext():
        thread.start()
        thread.join(2)  # it would have ended
        assert thread.is_alive()
    of_rank(1).wait(60)
    first.wait(60)
    thread.join(60)
    assert not thread.is_alive() and names(far) == ["step-1", "step-2"]


def test_a_save_that_nobody_works_on_is_not_waited_for(tmp_path: Path) -> None:
    run, far = tmp_path / "run", open_place(str(tmp_path / "far"))
    save(run, 1, elements=10)
    (run / f"step-2.partial-{'ab' * 16}").mkdir()
    running = Running(Following(open_place(str(run)), far, PLAIN, lambda event: None), lambda event: None, watch=True)
    running.finish()
    assert running.run(str(run), far.url) is None and names(far) == ["step-1"]


def test_a_wait_that_begins_behind_the_end_is_for_another_process(tmp_path: Path) -> None:
    """As of a Checkpointer that was let go while a save was on its way: the trainer sees that it has heeded no more, and starts it again."""
    run, far = tmp_path / "run", open_place(str(tmp_path / "far"))
    save(run, 1, elements=10)
    told: list[dict[str, Any]] = []
    running = Running(Following(open_place(str(run)), far, PLAIN, told.append), told.append, watch=True)
    running.ring(1)
    running.finish()
    running._bind()
    save(run, 2, elements=10)
    running.ring(2)
    thread = threading.Thread(target=running.run, args=(str(run), far.url), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and running.rings_heeded == 1
    assert [e["ticket"] for e in told if e["event"] == "synced"] == [1] and names(far) == ["step-1"]
