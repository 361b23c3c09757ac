"""Histories of a run with rollbacks and new nodes: a drain comes to an end, and neither place loses what it is to keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import holdfast as command
from draining import MIB, names, save, swept
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.drain import Drain, tiers
from holdfast.drain.places import Info, age_of, open_place
from holdfast.drain.tiers import Rules

# A save goes on from what was saved or loaded last; a load goes back to one of the newest; on a new node the first place is empty.
EVENTS = st.sampled_from(("save", "save", "save", "load 0", "load 1", "load 2", "load 3", "node", "sweep"))


class Run:
    """A model of both places, and of the run that saves."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.local: list[Info] = []
        self.remote: list[Info] = []
        self._saves = 0
        self._last: Info | None = None

    def step(self, event: str) -> None:
        what, _, back = event.partition(" ")
        every = sorted(tiers._merged(self.remote, self.local), key=age_of)
        if what == "save":
            self._saves += 1
            step = self._last.step + 1 if self._last else 1
            name, attempt = f"step-{step}", f"{self._saves:032x}"
            parent = self._last.attempt if self._last else ""
            self._last = Info(name, name, "holdfast", step, float(self._saves), attempt, parent, 1, 10, "r")
            self.local = [*(c for c in self.local if c.name != name), self._last]
        elif what == "load" and every:
            self._last = every[max(0, len(every) - 1 - int(back))]
        elif what == "node":
            self.local = []
            self._last = max(self.remote, key=age_of, default=None)
        elif what == "sweep":
            self.sweep()

    def sweep(self) -> None:
        """As `Following._sweep`."""
        before = tiers._merged(self.remote, self.local)
        options, series = self.rules.options, tiers._series(self.local, self.rules.form)
        kept = {c.key for c in before if c.name not in tiers.let_go(before, options.keep_last, options.keep_every, series)}
        sent: set[tuple[str, str]] = set()
        newest, is_applied = self.local[-1:], False
        while (wanted := tiers.to_send(self.local, self.remote, self.rules)) or not is_applied:
            for info in wanted[:1]:
                assert info.key not in sent, f"{info.name} is sent again"
                sent.add(info.key)
                self.remote = sorted([*(c for c in self.remote if c.name != info.name), info], key=age_of)
            for info in tiers.to_remove_remotely(self.local, self.remote, self.rules):
                assert info.key not in kept, f"{info.name} is removed from the second place"
                self.remote.remove(info)
            for info in tiers.to_remove_locally(self.local, self.remote, self.rules):
                assert info.key in {c.key for c in self.remote} | sent or info.key not in kept, f"{info.name} has not arrived"
                self.local.remove(info)
            is_applied = True
        assert {c.key for c in newest} <= {c.key for c in self.remote}


@settings(max_examples=600, deadline=None)
@given(st.lists(EVENTS, max_size=14), st.integers(0, 3), st.sampled_from((0, 2, 3)), st.integers(0, 3), st.sampled_from(("", "step-{step}")))
@example(["save", "save", "save", "save", "save", "sweep", "load 3", "save"], 2, 0, 0, "")
def test_each_checkpoint_is_sent_once(events: list[str], keep: int, every: int, keep_local: int, form: str) -> None:
    run = Run(Rules(Drain(keep_last=keep, keep_every=every), keep_local, 0, form))
    for event in (*events, "sweep", "sweep"):
        run.step(event)


def test_a_rollback_beyond_what_the_second_place_keeps(tmp_path: Path) -> None:
    """The newest ones there are of the abandoned branch; of the other one, more than one is sent."""
    first, second = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    save(tmp_path / "run", 1, 2, 3, 4, 5, elements=8)
    swept(first, second, Drain(keep_last=2))
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB) as checkpointer:
        checkpointer.load(2)
        checkpointer.save({"w": torch.zeros(3)}, 3, replace=True)
    swept(first, second, Drain(keep_last=2))
    assert names(second) == ["step-2", "step-3"]


@pytest.mark.parametrize("form", ["", "step-{step}"])
def test_each_format_has_a_series_of_its_own(form: str, tmp_path: Path) -> None:
    first, second = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    save(tmp_path / "run", 1, 2, 3, elements=8, format="dcp")
    save(tmp_path / "run", 4, 5, 6, elements=8)
    swept(first, second, Drain(keep_last=2), keep_local=1, form=form)
    assert (names(first), names(second)) == (["step-3", "step-6"], ["step-2", "step-3", "step-5", "step-6"])


def test_a_checkpoint_that_retention_would_remove_at_once_is_refused_by_its_name(tmp_path: Path) -> None:
    first, second = tmp_path / "run", tmp_path / "far"
    save(first, 1, 2, 3, elements=8)
    assert command("drain", first, second, "--keep-last", 2, torch=False).status == 0
    for options in ((), ("--keep-source", 1)):
        done = command("drain", first, second, "--keep-last", 2, "--name", "step-1", *options, torch=False)
        assert done.status == 2 and "step-1" in done.error and "give a larger --keep-last" in done.error
        assert names(open_place(str(first))) == ["step-1", "step-2", "step-3"]
    assert names(open_place(str(second))) == ["step-2", "step-3"]
    assert command("drain", first, second, "--keep-last", 3, "--name", "step-1", torch=False).status == 0
    assert names(open_place(str(second))) == ["step-1", "step-2", "step-3"]
