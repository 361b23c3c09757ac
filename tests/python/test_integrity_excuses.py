"""integrity-fuzz: which failures of saves have an excuse, what a recovery may leave, and whose content a load gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_integrity import WAIT, event, made, save

import holdfast
from holdfast.integrity import jobs, judge, processes, rounds, schedule, states

SECOND = 10**9
LOST = "its worker was killed by signal 9 (KILL) before it reported a result"
LATER = "a save that began later was completed in the meantime; the younger one stays"
Told = tuple[int, str, int, int, Any]  # second, event, number of the save, rank, and the event's kind or the error


def _path(number: int) -> str:
    return f"/run/step-{number % schedule.SAVES_OF_JOB}"


def lines(*told: Told) -> list[dict[str, Any]]:
    """Lines of trainers. An error is a code, or a code and a message."""
    found = []
    for second, what, number, rank, value in told:
        line: dict[str, Any] = {"event": what, "n": number, "rank": rank, "job": number // schedule.SAVES_OF_JOB, "at": second * SECOND}
        if what == "fired":
            line |= {"kind": value, "phase": "call" if value in schedule.LIMITS else "writing"}
        elif what in ("failed", "refused"):
            code, _, message = value.partition(": ")
            line["errors"] = [{"rank": "", "type": "Error", "ours": True, "code": code, "errno": 0, "message": f"{_path(number)}: {message}"}]
            line["skipped"] = "skipped" in message
        elif what == "durable":
            line["path"] = _path(number)
        elif what == "called":
            line["skipped"] = value == "skipped"
        found.append(line)
    return found


def blamed(told: list[Told], standing: set[tuple[int, str]] | None = None, **given: Any) -> list[int]:
    """Numbers of the saves that fail without an excuse."""
    actions = [save(n) for n in (1, 2, 3, 4)]
    if kind := given.pop("planned", ""):
        actions[0] |= event(kind)
    looking = judge.Judge(made(*actions, **given), "/run")
    looking._standing = standing
    looking.hear(lines(*told), actions)
    assert all(p["invariant"] == "v" and p["what"].startswith("save ") for p in looking.problems), looking.problems
    return sorted({int(p["what"].split()[1]) for p in looking.problems})


def one(number: int, at: int, outcome: str, error: str = "", ranks: int = 1) -> list[Told]:
    """A save that is called at a time and ends a second later, on all ranks."""
    return [(at, "call", number, r, None) for r in range(ranks)] + [(at + 1, outcome, number, r, error) for r in range(ranks)]


KILLED = [(1, "call", 1, 0, None), (2, "fired", 1, 0, "kill-worker"), (3, "failed", 1, 0, f"ABORTED: {LOST}")]


@pytest.mark.parametrize(
    ("message", "is_named"),
    [
        (f"save /run/step-1: {LOST}", True),
        (f"save /run/.step-1.partial-8: {LOST}", True),
        ("create staging arena: mmap: Cannot allocate memory", True),
        (f"save /run/step-10: {LOST}", False),
        (f"save to /run: {LOST}", False),
    ],
)
def test_an_error_names_its_save(message: str, is_named: bool) -> None:
    told = lines(*KILLED)
    told[-1]["errors"][0]["message"] = message
    looking = judge.Judge(made(save(1) | event("kill-worker")), "/run")
    looking.hear(told, [save(1) | event("kill-worker")])
    assert [p["what"] for p in looking.problems] == ([] if is_named else [f"save 1 (step-1) failed on rank 0 with a message that names no object: {message}"])


@pytest.mark.parametrize(
    ("launcher", "later", "wrong"),
    [
        ("spawn", ["durable", "failed"], [3]),
        ("spawn", ["failed", "durable"], [2]),
        ("persistent", ["failed", "durable"], []),  # it was handed to the worker before anybody saw its end
        ("persistent", ["failed", "failed"], [3]),
        ("persistent", ["durable", "failed"], [3]),
    ],
)
def test_the_end_of_a_worker_fails_what_it_serves(launcher: str, later: list[str], wrong: list[int]) -> None:
    told = [*KILLED, *one(2, 4, later[0], f"ABORTED: {LOST}"), *one(3, 6, later[1], f"ABORTED: {LOST}")]
    assert blamed(told, launcher=launcher) == wrong


@pytest.mark.parametrize("launcher", ["spawn", "persistent"])
def test_saves_that_are_called_before_a_kept_workers_end_is_seen_fail_together(launcher: str) -> None:
    queued: list[Told] = [(2, "call", n, 0, None) for n in (2, 3)] + [(4, "failed", n, 0, f"ABORTED: {LOST}") for n in (2, 3)]
    told = [KILLED[0], (1, "fired", 1, 0, "kill-worker"), *queued, KILLED[2]]
    assert blamed(told, launcher=launcher) == ([] if launcher == "persistent" else [2, 3])


def test_an_event_fails_nothing_before_it() -> None:
    assert blamed([*one(1, 1, "failed", "ABORTED: step-1"), (5, "call", 3, 0, None), (6, "fired", 3, 0, "kill-worker")]) == [1]


def test_an_event_of_the_other_trainer_is_no_excuse() -> None:
    other = 1 + schedule.SAVES_OF_JOB
    told = [*KILLED, (1, "call", other, 0, None), (4, "failed", other, 0, f"ABORTED: {LOST}")]
    assert blamed(told, jobs=2, launcher="persistent") == [other]


@pytest.mark.parametrize(("launcher", "wrong"), [("spawn", [2, 3]), ("persistent", [])])
def test_a_kept_worker_keeps_the_limit_that_it_was_started_under(launcher: str, wrong: list[int]) -> None:
    told = [(1, "call", 1, 0, None), (2, "fired", 1, 0, "limit-size"), (3, "failed", 1, 0, "RESOURCE_EXHAUSTED: step-1"),
            *one(2, 4, "failed", "RESOURCE_EXHAUSTED: step-2"), *one(3, 6, "failed", "RESOURCE_EXHAUSTED: step-3")]  # fmt: skip
    assert blamed(told, launcher=launcher) == wrong


def test_a_failure_of_one_rank_fails_the_saves_of_all_until_all_have_ended() -> None:
    told: list[Told] = [(1, "call", 1, 0, None), (1, "call", 1, 1, None), (2, "fired", 1, 0, "cancel"),
                        (3, "failed", 1, 0, "CANCELLED: step-1"), (4, "call", 2, 0, None), (5, "failed", 1, 1, "ABORTED: step-1"),
                        (6, "call", 2, 1, None), (7, "failed", 2, 0, "DEADLINE_EXCEEDED: step-2"),
                        (8, "failed", 2, 1, "ABORTED: step-2"), *one(3, 9, "failed", "ABORTED: step-3", 2)]  # fmt: skip
    assert blamed(told, ranks=2) == [3]


@pytest.mark.parametrize(("ranks", "wrong"), [(2, []), (1, [2, 3])])
def test_a_rank_that_is_gone_fails_all_further_saves(ranks: int, wrong: list[int]) -> None:
    told: list[Told] = [(1, "call", 1, 0, None), (1, "call", 1, 1, None), (2, "fired", 1, 1, "kill-trainer"),
                        (3, "failed", 1, 0, "ABORTED: step-1"), *one(2, 4, "failed", "ABORTED: step-2"),
                        *one(3, 9, "failed", "ABORTED: step-3")]  # fmt: skip
    assert [n for n in blamed(told, ranks=ranks) if n > 1] == wrong


@pytest.mark.parametrize(("planned", "code", "wrong"), [
    ("hang-worker", "DEADLINE_EXCEEDED", []), ("hang-worker", "ABORTED", [2]), ("kill-trainer", "DEADLINE_EXCEEDED", [2]),
])  # fmt: skip
def test_short_deadlines_may_be_missed_without_the_event(planned: str, code: str, wrong: list[int]) -> None:
    assert blamed(one(2, 1, "failed", f"{code}: step-2"), planned=planned) == wrong


# ---- Other saves.


def test_a_save_is_overtaken_by_a_later_one_that_overlaps() -> None:
    both: list[Told] = [(1, "call", 1, 0, None), (2, "call", 2, 0, None), (3, "durable", 2, 0, None)]
    of_one_name = {"replace": True, "one_name": True}

    def wrong(*told: Told) -> list[int]:
        return blamed([(*line[:4], line[4]) for line in told if line[1] != "durable"], **of_one_name)

    assert wrong(*both, (4, "failed", 1, 0, f"ABORTED: step-latest: {LATER}")) == []
    assert wrong(*both, (4, "failed", 1, 0, f"ABORTED: step-latest: {LOST}")) == [1]
    assert wrong(*one(1, 1, "failed", f"ABORTED: step-latest: {LATER}"), *one(2, 3, "durable")) == [1]
    assert wrong((1, "call", 1, 0, None), (1, "called", 1, 0, ""), *one(2, 3, "failed", f"ABORTED: step-latest: {LATER}")) == [2]


@pytest.mark.parametrize(("standing", "wrong"), [(None, []), ({(0, "step-1")}, []), (set(), [1])])
def test_what_a_crashed_save_left_takes_no_name(standing: set[tuple[int, str]] | None, wrong: list[int]) -> None:
    again = made(save(2), save(1), jobs=2, same_names=True)
    again["lives"] = [[{**save(2), "step": 1}], [save(1)]]
    looking = judge.Judge(again, "/run")
    looking.hear(lines((1, "call", 2, 0, None)), again["lives"][0])
    looking._standing = standing
    looking.hear(lines(*one(1, 3, "refused", "ALREADY_EXISTS: step-1")), again["lives"][1])
    assert [int(p["what"].split()[1]) for p in looking.problems] == wrong


@pytest.mark.parametrize("when_full", ["skip", "fail"])
def test_a_save_finds_memory_where_no_other_holds_any(when_full: str) -> None:
    def second(at: int) -> list[Told]:
        if when_full == "skip":
            return [(at, "call", 2, 0, None), (at + 1, "called", 2, 0, "skipped")]
        return one(2, at, "refused", "RESOURCE_EXHAUSTED: step-2: staging")

    assert blamed([*one(1, 1, "durable"), *second(3)], when_full=when_full) == [2]
    assert blamed([(1, "call", 1, 0, None), *second(2), (9, "durable", 1, 0, None)], when_full=when_full) == []
    assert blamed([*KILLED, *second(4)], when_full=when_full) == []  # its last transfer may go on
    assert blamed([*one(1, 1, "durable"), *one(2, 3, "failed", "RESOURCE_EXHAUSTED: step-2")], when_full="wait") == [2]


@pytest.mark.parametrize(("of_the_other", "wrong"), [("skipped", []), ("", [2])])
def test_a_save_that_one_rank_leaves_out_is_left_out_by_all(of_the_other: str, wrong: list[int]) -> None:
    told: list[Told] = [(1, "call", 1, 0, None), (1, "call", 1, 1, None), (2, "call", 2, 0, None), (2, "call", 2, 1, None),
                        (3, "called", 2, 0, ""), (3, "called", 2, 1, of_the_other), (9, "durable", 1, 0, None), (9, "durable", 1, 1, None),
                        (4, "failed", 2, 0, "UNAVAILABLE: rank 1 failed: step-2: skipped, because")]  # fmt: skip
    assert blamed(told, ranks=2, when_full="skip") == wrong


@pytest.mark.parametrize(("number", "errors", "is_fine"), [(30, {"WRITE EIO": 1}, True), (30, {}, False), (13, {"WRITE EIO": 1}, False)])
def test_a_file_system_that_errs_may_become_read_only(number: int, errors: dict[str, int], is_fine: bool) -> None:
    told = lines((1, "call", 1, 0, None), (3, "failed", 1, 0, "PERMISSION_DENIED: step-1"))
    told[1]["errors"][0]["errno"] = number
    looking = judge.Judge(made(save(1)), "/run")
    looking.hear(told, [save(1)], errors)
    assert (looking.problems == []) == is_fine, looking.problems


@pytest.mark.parametrize(("fault", "number", "is_fine"), [
    (5, 5, True), (5, 0, True), (5, 28, False), (5, 11, False),
    (17, 2, True),  # EEXIST of a directory that was then not there
    (12, 11, True),  # ENOMEM of a new thread, of which the C library makes EAGAIN
])  # fmt: skip
def test_a_failure_by_one_fault_has_its_errno(fault: int, number: int, is_fine: bool) -> None:
    told = lines((1, "call", 1, 0, None), (2, "fired", 1, 0, "fault"), (3, "failed", 1, 0, "DATA_LOSS: step-1"))
    told[1]["errno"] = fault
    told[2]["errors"][0]["errno"] = number
    looking = judge.Judge(made(save(1)), "/run")
    looking.hear(told, [save(1)])
    assert ([p["invariant"] for p in looking.problems] == []) == is_fine, looking.problems


@pytest.mark.parametrize(("said", "fine"), [("t0 differs in 1 of 9 bytes", True), ("t0 differs in 2 of 9 bytes", False)])
@pytest.mark.parametrize("kind", ["change-and-restore", "cancel"])
def test_a_change_that_was_undone_is_one_byte_of_a_save_under_way(kind: str, said: str, fine: bool) -> None:
    looking = judge.Judge(made(save(1, **event("change-and-restore")), save(2)), "/run")
    looking.hear(lines((1, "call", 1, 0, None), (2, "fired", 1, 0, kind), (3, "durable", 1, 0, None), *one(2, 4, "durable")), [])
    assert looking.problems == []
    assert looking._may_be_damaged({1}, f"DATA_LOSS: {said}") == (fine and kind != "cancel")
    assert not looking._may_be_damaged({2}, f"DATA_LOSS: {said}")


# ---- After a recovery.

MANIFEST = f"rank-00000-of-00002-{1:032x}.manifest.json"


def test_what_the_first_life_leaves_is_found_before_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery that does nothing the first time: that of the second life would hide it."""
    real, calls = holdfast.recover, iter((True,))

    def recover(directory: Any, **options: Any) -> Any:
        return {"kept_incomplete": []} if next(calls, False) else real(directory, **options)

    round_ = made(trainer_death="stop")
    round_["lives"] = [[save(1), WAIT, save(2, **event("kill-both"))], [save(3)]]
    jobs.start_server()
    with processes.adopting():
        monkeypatch.setattr(holdfast, "recover", recover)
        found = rounds.run(round_, str(tmp_path)).problems
    assert [p["invariant"] for p in found] == ["iv"] and "step-2.partial-" in found[0]["what"], found


@pytest.mark.parametrize(("name", "fine"), [("ranks.board", True), ("model-00001-of-00002.safetensors.tmp", False)])
def test_what_a_recovery_leaves_in_a_checkpoint_is_found(name: str, fine: bool, tmp_path: Path) -> None:
    looking = judge.Judge(made(save(1)), str(tmp_path))
    holdfast.save(states.make(1, 1, 0, looking.expected.spec(1)), tmp_path / "step-1", step=1)
    looking.made[1] = judge.Made(1, "step-1", 0, 0, 1, 2, {0: "durable"})
    (tmp_path / "step-1" / name).touch()
    looking.look(thorough=True)
    assert (looking.problems == []) == fine, looking.problems


@pytest.mark.parametrize(("files", "kept", "fine"), [
    ([], "", True), (["common.pt"], "", True), (["__0_0.distcp.tmp"], "", False),
    (["__0_0.distcp"], "", True),  # whose worker was killed before the manifest
    (["__0_0.distcp", MANIFEST], "", False), (["__0_0.distcp", MANIFEST], "nothing proves that it is of the save", True),
    (["__0_0.distcp", MANIFEST], "a save is running there", False),
])  # fmt: skip
def test_a_directory_without_metadata_has_a_reason_to_stay(files: list[str], kept: str, fine: bool, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    looking = judge.Judge(made(save(1), door="dcp"), str(tmp_path))
    (tmp_path / "step-1").mkdir()
    for name in files:
        (tmp_path / "step-1" / name).touch()
    monkeypatch.setattr(judge, "recover", lambda _: [f"step-1: {kept}"] if kept else [])
    looking.recover()
    looking.look(thorough=True)
    assert (looking.problems == []) == fine, looking.problems


@pytest.mark.parametrize("thorough", [True, False])
def test_only_orphans_commit_behind_a_list(thorough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = judge.Judge(made(save(1)), str(tmp_path))
    holdfast.save(states.make(1, 1, 0, looking.expected.spec(1)), tmp_path / "step-1", step=1)
    looking.made[1] = judge.Made(1, "step-1", 0, 0, 1, 2, {0: "durable"})
    other = {"name": "step-2", "path": str(tmp_path / "step-2")}
    monkeypatch.setattr(looking, "_newest", lambda _: (other, other))
    looking.look(thorough)
    assert [p["invariant"] for p in looking.problems] == ["iii"] * thorough


# ---- After damage.


@pytest.mark.planted("takes_a_file_of_another_save")
def test_a_load_that_takes_another_saves_file_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound file in the place of another one is damage, too."""
    real = holdfast.load

    def files(path: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}

    def load(path: str, into: Any = None, **options: Any) -> Any:
        try:
            return real(path, into, **options)
        except holdfast.Error:
            for other in Path(path).parent.iterdir():
                if other != Path(path) and files(other) == files(Path(path)):
                    return real(other, into, **options)
            raise

    corruptions = [{"kind": "swap files", "key": key} for key in range(8)]
    for planted in (False, True):
        directory = tmp_path / str(planted)
        looking = judge.Judge(made(save(1), save(2), corruptions=corruptions), str(directory))
        for n in (1, 2):
            holdfast.save(states.make(1, n, 0, looking.expected.spec(n)), directory / f"step-{n}", step=n)
            looking.made[n] = judge.Made(n, f"step-{n}", 0, 0, n, n + 0.5, {0: "durable"})
        if planted:
            monkeypatch.setattr(holdfast, "load", load)
        looking.look(thorough=True)
        assert {p["invariant"] for p in looking.problems} == ({"ii"} if planted else set()), looking.problems


@pytest.mark.parametrize("has_journal", [True, False])
def test_a_file_with_the_name_of_a_removed_directory_is_of_a_file_system_without_a_journal(has_journal: bool, tmp_path: Path) -> None:
    looking = judge.Judge(made(save(1), door="dcp"), str(tmp_path))
    looking.may_mix_entries = not has_journal
    (tmp_path / "step-1").write_text("data of another file")
    looking.recover()
    looking.look(thorough=True)
    assert len(looking.problems) == has_journal, looking.problems
