"""What people and their tools see of saves: log lines, JSON lines, metrics, traces, a plot."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import _log, events, observe
from holdfast.observe.chrome_trace import spans

MIB = 1 << 20


def save(path: Path, step: int = 1, nbytes: int = 64, **options: Any) -> holdfast.Save:
    state = {"w": torch.full((max(nbytes // 4, 1),), float(step))}
    return holdfast.save_async(state, path, step=step, **options)


def failing_save(directory: Path) -> holdfast.Error:
    """A save whose worker finds no room: a file size limit, which it inherits."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(holdfast.Error) as failed:
            # The call raises it if the worker is faster than the copies.
            save(directory / "failed", 9, 2 * MIB).wait(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return failed.value


@pytest.fixture(autouse=True, scope="module")
def _memory() -> Any:
    """Staging memory is there before any limit of file sizes: it is a file, too."""
    holdfast.configure(arena_bytes=16 * MIB)
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory) / "a").wait(60)
    yield
    holdfast.configure(arena_bytes=0)


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "holdfast" and r.levelno == level]


# ---- Logging.


@pytest.fixture(autouse=True)
def machine_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine makes saves do without counts as said: the first save's line is alone."""
    monkeypatch.setattr(_log, "_told", {"engine", "pages", "direct_io", "streamed"})


def test_a_save_is_one_line_with_its_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    save(tmp_path / "a", 7, 2 * MIB).wait(60)
    (line,) = lines(caplog, logging.INFO)
    assert line.startswith(f"[rank 0] saved {tmp_path / 'a'} (step 7): 2.0")
    assert "MiB" in line and "durable after" in line and "blocked" in line


def test_a_second_attempt_at_writing_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    ended: list[Any] = []
    with events.Handle(lambda *event: ended.append(event)):
        assert save(tmp_path / "a").wait(60)["write_attempts"] == 1
    ((subject, report, error),) = ended
    _log.log(subject, {**report, "write_attempts": 2}, error)
    (line,) = lines(caplog, logging.WARNING)
    assert "an fsync failed at first" in line


def test_memory_without_registration_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[Any] = []
    with events.Handle(lambda *event: ended.append(event)):
        assert save(tmp_path / "a").wait(60)["unregistered"] == ""
    ((subject, report, error),) = ended
    for _ in range(2):
        _log.log(subject, {**report, "unregistered": "register with cuda:0: no pins"}, error)
    (line,) = lines(caplog, logging.WARNING)
    assert "cuda:0: no pins" in line and "slow" in line


def test_what_a_save_does_without_is_one_line_with_what_to_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    ended: list[Any] = []
    with events.Handle(lambda *event: ended.append(event)):
        save(tmp_path / "a").wait(60)
    ((subject, report, error),) = ended
    monkeypatch.setattr(_log, "_told", set())
    caplog.clear()
    refused = "io_uring_setup: EPERM (seccomp filter or kernel.io_uring_disabled); pwrite, threads: 2"
    less = {"engine": "pwrite", "engine_reason": refused, "pages": "small", "direct_io": "no", "streamed": True}
    for _ in range(2):
        _log.log(subject, {**report, **less}, error)
    told = [line for line in lines(caplog, logging.INFO) if "saved" not in line]
    assert len(told) == 4
    for line, why, change in zip(
        told,
        ("EPERM", "small pages", "page cache", "staging memory"),
        ("seccomp profile", "vm.nr_hugepages", "ext4 or xfs", "arena_bytes"),
        strict=True,
    ):
        assert why in line and change in line
    no_memory = "io_uring_setup: ENOMEM (memory limit); pwrite, threads: 2"
    _, engine = next(_log.fallbacks({**report, **less, "engine_reason": no_memory}))
    assert "ulimit -l" in engine and "seccomp" not in engine
    # What was asked for is no fallback.
    asked = {"engine": "pwrite", "engine_reason": "pwrite, threads: 2", "pages": "hugetlb", "direct_io": "proven", "streamed": False}
    assert not list(_log.fallbacks({**report, **asked}))


def test_every_rank_says_which_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    state = {"w": torch.ones(100), "rng": torch.get_rng_state()}
    for step in (1, 2):
        both = [
            holdfast.save_async(
                state,
                tmp_path / f"s{step}",
                step=step,
                rank=rank,
                world_size=2,
                attempt=f"{step}" * 32,
            )
            for rank in (0, 1)
        ]
        reports = [handle.wait(60) for handle in both]
    said = sorted(lines(caplog, logging.INFO))
    assert [line[:8] for line in said] == ["[rank 0]"] * 2 + ["[rank 1]"] * 2
    # With ranks of its own numbering every rank saves all that it holds.
    assert [r["stale"] for r in reports] == [True, True]


def test_a_failed_save_is_an_error_with_code_and_errno(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        error = failing_save(tmp_path)
        if lines(caplog, logging.ERROR):  # not raised by the call: it is not logged as well then
            break
    (line,) = lines(caplog, logging.ERROR)
    assert line.startswith(f"[rank 0] save {tmp_path / 'failed'} (step 9) failed: {error.code}")
    assert f"errno {error.errno}" in line and error.errno != 0


def test_a_refused_save_is_raised_and_not_logged_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "a").wait(60)
    with pytest.raises(holdfast.Error, match="exists"):
        save(tmp_path / "a")
    assert not lines(caplog, logging.ERROR)


def test_the_root_logger_is_left_alone(tmp_path: Path) -> None:
    program = (
        "import logging, sys, torch, holdfast\n"
        "root = logging.getLogger()\n"
        "before = list(root.handlers), root.level\n"
        "holdfast.save_async({'w': torch.ones(9)}, sys.argv[1]).wait(60)\n"
        "assert (list(root.handlers), root.level) == before\n"
        "assert not logging.getLogger('holdfast').handlers\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- Observers as such.


def test_an_observer_that_raises_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []

    def broken(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    with events.Handle(broken), events.Handle(lambda *what: seen.append(what)):
        report = save(tmp_path / "a").wait(60)
    assert report["bytes"] > 0
    assert len(seen) == 1
    assert any("an observer of saves failed" in line for line in lines(caplog, logging.ERROR))


def test_a_closed_observer_hears_nothing_and_closes_twice(tmp_path: Path) -> None:
    seen = []
    handle = events.Handle(lambda *what: seen.append(what))
    handle.close()
    handle.close()
    save(tmp_path / "a").wait(60)
    assert not seen


def test_observers_do_not_run_in_the_training_thread(tmp_path: Path) -> None:
    threads = []
    with events.Handle(lambda *_: threads.append(threading.current_thread())):
        save(tmp_path / "a").wait(60)
    assert threads and threads[0] is not threading.main_thread()


def test_others_can_publish_to_the_same_observers(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    subject = events.Published("/x/step-1", 1, {"kind": "dcp", "rank": 3, "world_size": 4})
    with observe.jsonl(file):
        before = events.in_flight()
        events.begin(subject)
        assert events.in_flight() == before + 1
        events.publish(subject, None, holdfast.Error("ABORTED", "save: rank 2 died", 0))
        assert events.in_flight() == before
    (line,) = observe.read_jsonl(file)
    assert (line["kind"], line["rank"], line["outcome"]) == ("dcp", 3, "failed")
    assert line["error"] == {"code": "ABORTED", "message": "save: rank 2 died", "errno": 0}


def test_what_cannot_be_called_is_no_observer() -> None:
    before = list(events.observers)
    with pytest.raises(holdfast.Error, match="Handle: observer 5: a function") as refused:
        events.Handle(5)  # type: ignore[arg-type]
    assert refused.value.code == "INVALID_ARGUMENT" and events.observers == before


# ---- JSON lines.


@pytest.mark.parametrize("opened", [observe.jsonl, observe.trace])
def test_the_directory_of_a_file_is_made(opened: Any, tmp_path: Path) -> None:
    with opened(tmp_path / "run" / "logs" / "file"):
        pass
    assert (tmp_path / "run" / "logs" / "file").exists()


def test_files_that_cannot_be_opened_are_told_with_the_operation(tmp_path: Path) -> None:
    for opened in (observe.jsonl, observe.trace):
        with pytest.raises(IsADirectoryError, match=f"observe.{opened.__name__} {tmp_path}: Is a directory") as error:
            opened(tmp_path)
        assert isinstance(error.value, holdfast.Error)
    with pytest.raises(FileNotFoundError, match="read .*none: No such file") as error:
        list(observe.read_jsonl(tmp_path / "none"))
    assert isinstance(error.value, holdfast.Error)


def test_json_lines_tell_of_every_outcome(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    with observe.jsonl(file):
        report = save(tmp_path / "a", 1).wait(60)
        with pytest.raises(holdfast.Error):
            save(tmp_path / "a", 2)
        failing_save(tmp_path)
    save(tmp_path / "b", 3).wait(60)
    found = list(observe.read_jsonl(file))
    assert [(r["outcome"], r["step"]) for r in found] == [
        ("durable", 1),
        ("refused", 2),
        ("failed", 9),
    ]
    assert found[0]["error"] is None
    assert {k: found[0][k] for k in report} == report
    assert found[1]["error"]["code"] == "ALREADY_EXISTS"
    assert found[2]["error"]["errno"] != 0


def test_reports_know_the_trainers_whole_stall(tmp_path: Path) -> None:
    before = time.monotonic_ns()
    report = save(tmp_path / "a", 1, 4 * MIB).wait(60)
    assert before <= report["called_ns"] <= report["entered_ns"] <= time.monotonic_ns()
    assert report["time_blocked"] >= report["time_in_call"] > 0


def test_points_in_time_are_in_their_order(tmp_path: Path) -> None:
    r = save(tmp_path / "a", 1, 4 * MIB).wait(60)
    names = ["first_submit", "last_complete", "data_synced", "manifest_synced", "committed"]
    points = [r["at_worker_started"], *(r["at_" + n] for n in names), r["time_to_durable"]]
    assert points == sorted(points) and points[0] > 0


# ---- Prometheus.


def test_metrics_count_saves_bytes_and_seconds(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value("holdfast_" + name, labels)

    with observe.prometheus(registry):
        nbytes = 0
        for step in (1, 2):
            nbytes += save(tmp_path / f"s{step}", step, MIB).wait(60)["bytes"]
        with pytest.raises(holdfast.Error):
            save(tmp_path / "s1")
        failing_save(tmp_path)
        assert value("saves_total", outcome="durable", kind="state") == 2
        assert value("saves_total", outcome="refused", kind="state") == 1
        assert value("saves_total", outcome="failed", kind="state") == 1
        assert value("bytes_total", kind="state") == nbytes
        assert value("save_seconds_count", phase="durable") == 2
        assert (value("save_seconds_sum", phase="durable") or 0) > 0
        assert value("last_durable_step") == 2
        assert abs((value("last_durable_timestamp_seconds") or 0) - time.time()) < 60
        save(tmp_path / "s3", 3, MIB).wait(60)
        assert value("staging_cap_bytes") == holdfast.staging()["arena_bytes"] > 0
        assert (value("staging_held_peak_bytes") or 0) >= MIB
        assert value("saves_in_flight") == events.in_flight()
    assert list(registry.collect()) == []


def test_a_save_in_flight_is_seen_in_the_gauge(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    during = []

    def look(*_: Any) -> None:  # an observer is called before its save has ended
        during.append(registry.get_sample_value("holdfast_saves_in_flight"))

    with observe.prometheus(registry), events.Handle(look):
        save(tmp_path / "a").wait(60)
        assert registry.get_sample_value("holdfast_saves_in_flight") == 0
    assert during == [1]


def test_a_registry_has_the_metrics_once(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    with observe.prometheus(registry):
        with pytest.raises(holdfast.Error, match="Duplicated"):
            observe.prometheus(registry)
        save(tmp_path / "a").wait(60)
        assert registry.get_sample_value(
            "holdfast_saves_total", {"outcome": "durable", "kind": "state"}
        )
    with observe.prometheus(registry):  # again, after it was closed
        pass


# ---- Traces.


def spans_in(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text()) if e["ph"] == "X"]


def test_a_trace_lays_saves_against_steps(tmp_path: Path) -> None:
    file = tmp_path / "trace-{rank}.json"
    handles = []
    with observe.trace(file):
        for n in range(3):
            with observe.step(n):
                handles.append(save(tmp_path / f"s{n}", n, 4 * MIB))
        for handle in handles:
            handle.wait(60)
    found = spans_in(tmp_path / "trace-0.json")
    for n in range(3):
        own = {e["name"]: e for e in found if e["args"]["step"] == n}
        order = ["call", "stage", "seal", "write", "sync", "manifest", "commit"]
        assert [k for k in order if k in own] == order
        step, call = own[f"step {n}"], own["call"]
        assert step["tid"] == call["tid"]
        assert step["ts"] <= call["ts"]
        assert call["ts"] + call["dur"] <= step["ts"] + step["dur"]
        for before, after in zip(order[3:], order[4:], strict=False):
            end = own[before]["ts"] + own[before]["dur"]
            assert end == own[after]["ts"]  # one ends where the next begins
        assert abs(own["stage"]["ts"] / 1e6 - time.time()) < 600


def test_spans_of_one_row_nest_or_follow_each_other(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with observe.trace(file):
        handles = [save(tmp_path / f"s{n}", n, 2 * MIB) for n in range(4)]
        for handle in handles:
            handle.wait(60)
    rows: dict[int, list[tuple[float, float]]] = {}
    for e in spans_in(file):
        rows.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for row in rows.values():
        row.sort(key=lambda s: (s[0], -s[1]))
        open_until: list[float] = []
        for begin, end in row:
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_marked_steps_end_where_the_next_begins(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with observe.trace(file):
        for n in range(4):
            observe.mark_step(n)
        assert [e["name"] for e in spans_in(file)][-3:] == ["step 0", "step 1", "step 2"]


def test_steps_without_a_trace_cost_nothing_and_leave_nothing() -> None:
    with observe.step(1):
        pass
    observe.mark_step(1)


def test_a_failed_save_is_a_mark_in_the_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with observe.trace(file):
        error = failing_save(tmp_path)
    (mark,) = [e for e in json.loads(file.read_text()) if e["ph"] == "i"]
    assert mark["name"] == "failed: failed" and error.code in mark["args"]["error"]


def test_files_of_ranks_have_their_names_before_the_process_group_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))  # as the launcher says
        lines = observe.jsonl(tmp_path / "saves-{rank}.jsonl")
        trace = observe.trace(tmp_path / "trace-{rank}.json")
        with observe.step(rank):
            pass
        lines.close()
        trace.close()
    assert sorted(os.listdir(tmp_path)) == ["saves-0.jsonl", "saves-1.jsonl", "trace-0.json", "trace-1.json"]
    for rank in range(2):
        spans_of_rank = json.loads((tmp_path / f"trace-{rank}.json").read_text())
        assert {e["pid"] for e in spans_of_rank} == {rank}


def test_every_event_of_a_trace_has_what_its_format_asks_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with observe.trace(file):
        with observe.step(1):
            save(tmp_path / "a", 1).wait(60)
        failing_save(tmp_path)
    events = json.loads(file.read_text())
    # By Chrome's "Trace Event Format": complete events, instants and metadata.
    needed = {"X": {"ts": int, "dur": int, "cat": str}, "i": {"ts": int, "s": str, "cat": str}, "M": {}}
    assert {e["ph"] for e in events} == set(needed)
    for event in events:
        for key, kind in {"name": str, "pid": int, "tid": int, "args": dict, **needed[event["ph"]]}.items():
            assert type(event[key]) is kind, event
        assert event.get("dur", 0) >= 0 and event.get("s", "p") in ("g", "p", "t")
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and type(event["args"]["name"]) is str
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    assert {e["tid"] for e in events if e["ph"] != "M"} <= named


_KILLED = """
import os, sys, torch, holdfast
file, directory = sys.argv[1:]
holdfast.observe.trace(file)
holdfast.observe.jsonl(directory + "/lines.jsonl")
print("ready", flush=True)
n = 0
while True:
    n += 1
    with holdfast.observe.step(n):
        if n % 50 == 0:
            holdfast.save_async({"w": torch.ones(1000)}, f"{directory}/latest", step=n,
                                replace=True).wait(60)
            print(n, flush=True)
"""


def test_a_killed_process_leaves_a_trace_that_is_json(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    for saves in (1, 3):
        child = subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(file), str(tmp_path)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        for _ in range(saves):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        child.stdout.close()
        found = spans_in(file)
        assert sum(e["name"] == "commit" for e in found) >= saves
        assert sum(e["cat"] == "step" for e in found) >= 50 * saves - 1
    assert len(list(observe.read_jsonl(tmp_path / "lines.jsonl"))) >= 4


@pytest.mark.parametrize("locked", [False, True])
def test_a_forked_child_writes_nothing_into_its_parents_trace(tmp_path: Path, locked: bool) -> None:
    file = tmp_path / "trace.json"
    with observe.trace(file) as handle:
        with observe.step(1):
            pass
        before = file.read_bytes()
        trace = handle._observer.__self__  # type: ignore[union-attr]
        if locked:  # as if another thread were writing at the fork
            trace._lock.acquire()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            with observe.step(2):
                pass
            subject = events.Published("/x", 1, {"rank": 0, "world_size": 1})
            trace.save(subject, None, holdfast.Error("ABORTED", "in a child"))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        if locked:
            trace._lock.release()
        assert file.read_bytes() == before


def test_a_report_without_points_in_time_has_no_spans() -> None:
    assert spans({"time_in_call": 1.0, "time_copying": 0.5, "time_to_staged": 2.0}) == []


# ---- The plot.


def test_a_run_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "run.jsonl", tmp_path / "run.png"
    with observe.jsonl(file):
        for n in range(3):
            save(tmp_path / f"s{n}", n, MIB).wait(60)
        with pytest.raises(holdfast.Error):
            save(tmp_path / "s0")
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.observe", "plot", str(file), str(picture)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("lines", "picture", "said"),
    [(b"no JSON", "x.png", "line 1 is none that"), (b"\xff\n", "x.png", "line 1 is none that"), (b"[]", "x.png", "line 1 is none that"),
     (b'{"outcome": "refused"}\n', "x.xyz", "x.xyz: its ending is none of")],
)  # fmt: skip
def test_what_cannot_be_drawn_is_one_line(lines: bytes, picture: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from holdfast.observe.__main__ import main

    (tmp_path / "run.jsonl").write_bytes(lines)
    assert main(["plot", str(tmp_path / "run.jsonl"), str(tmp_path / picture)]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_parts_of_a_drawn_save_follow_each_other(tmp_path: Path) -> None:
    from holdfast.observe.picture import _ends

    holdfast.configure(arena_bytes=16 * MIB)  # made anew: the first call then takes the longest
    report = save(tmp_path / "a", 1, MIB).wait(60)
    blocked, staged, durable = _ends(report)
    assert 0 < report["time_blocked"] == blocked <= staged <= durable
    entered = (report["entered_ns"] - report["called_ns"]) / 1e9
    assert durable == pytest.approx(entered + report["time_to_durable"])


def test_a_run_without_saves_cannot_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "run.jsonl").touch()
    with pytest.raises(holdfast.Error, match="it has no saves"):
        observe.plot(tmp_path / "run.jsonl", tmp_path / "run.png")


def test_the_legend_covers_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    report = {"outcome": "durable", "bytes": MIB, "entered_ns": 0, "time_in_call": 1.0, "time_to_staged": 2.0, "time_to_durable": 3.0}
    lines = [json.dumps({**report, "time": at}) for at in range(1, 9)]
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n")
    drawn = []
    save_figure = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *a, **k: (drawn.append(self), save_figure(self, *a, **k)))
    observe.plot(tmp_path / "run.jsonl", tmp_path / "run.png")
    axes = drawn[0].axes[0]
    legend = axes.get_legend().get_window_extent()
    assert len(axes.patches) == 3 * 8 and not any(legend.overlaps(bar.get_window_extent()) for bar in axes.patches)
    assert not legend.overlaps(axes._left_title.get_window_extent())
