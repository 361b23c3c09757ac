"""Removals and links wait for the save before them, and are given up if it fails."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import _completion
from holdfast.errors import Error
from holdfast.lightning import CheckpointIO, ordering
from holdfast.lightning.ordering import Order


@pytest.fixture(autouse=True)
def _no_test_waits_for_saves_of_another() -> Iterator[None]:
    yield
    ordering._orders.clear()  # a test that has failed leaves saves in flight


class Disk:
    """An order, and saves that end when a test says so."""

    def __init__(self, saves_in_flight_max: int = 9) -> None:
        self.order = Order(saves_in_flight_max)
        self.log: list[str] = []
        self.saves: dict[str, _completion.SeenFuture] = {}
        self.links: dict[str, str] = {}

    def save(self, path: str) -> None:
        def start() -> Any:
            self.saves[path] = _completion.SeenFuture()
            return SimpleNamespace(durable=self.saves[path])

        self.order.save(path, start)

    def end(self, path: str, error: Error | None = None) -> None:
        self.log.append(f"{'failed' if error else 'durable'} {path}")
        _completion.end(self.saves[path], None, error)

    def remove(self, path: str) -> None:
        def why_held() -> str:
            return next((f"{at} leads there" for at, to in self.links.items() if to == path), "")

        self.order.remove(path, lambda: self.log.append(f"remove {path}"), why_held)

    def link(self, path: str, target: str) -> None:
        def run() -> None:
            self.links[path] = target
            self.log.append(f"link {path} {target}")

        self.order.link(path, target, run)


def in_time(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("it did not happen within 30 s")


def test_a_removal_waits_until_the_save_before_it_is_durable() -> None:
    disk = Disk()
    disk.save("a")
    disk.end("a")
    disk.save("b")
    disk.remove("a")
    assert disk.log == ["durable a"]
    disk.end("b")
    assert disk.log == ["durable a", "durable b", "remove a"]


@pytest.mark.parametrize("second", [Disk.remove, Disk.save])
def test_what_one_order_asks_for_waits_for_the_save_of_another(second: Callable[[Disk, str], None]) -> None:
    first, other = Disk(), Disk()
    first.save("a")
    thread = threading.Thread(target=second, args=(other, "a"))
    thread.start()
    second(other, "b")  # which no one else saves
    thread.join(0.2)
    assert thread.is_alive()
    assert "remove a" not in other.log and "a" not in other.saves
    first.end("a")
    thread.join(30)
    assert not thread.is_alive()
    assert "remove a" in other.log or "a" in other.saves
    for path in list(other.saves):
        other.end(path)


def test_a_removal_is_given_up_when_the_save_before_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    disk.save("a")
    disk.end("a")
    disk.save("b")
    disk.remove("a")
    disk.end("b", Error("RESOURCE_EXHAUSTED", "no space", 28))
    disk.save("c")
    disk.end("c")
    disk.order.wait()
    assert "remove a" not in disk.log
    assert "remove a: given up, the save of b has failed" in caplog.text


def test_what_stays_for_a_save_that_has_failed_goes_when_that_would_go() -> None:
    disk = Disk()
    disk.save("a")
    disk.end("a")
    for path, before in (("b", "a"), ("c", "b")):
        disk.save(path)
        disk.remove(before)
        disk.end(path, Error("RESOURCE_EXHAUSTED", "no space", 28))
    disk.save("d")
    disk.remove("c")
    assert not any(line.startswith("remove") for line in disk.log)
    disk.end("d")
    assert {line for line in disk.log if line.startswith("remove")} == {"remove a", "remove b", "remove c"}


def test_what_stays_goes_when_the_save_that_has_failed_is_made_again() -> None:
    disk = Disk()
    disk.save("a")
    disk.end("a")
    disk.save("best")
    disk.remove("a")
    disk.end("best", Error("RESOURCE_EXHAUSTED", "no space", 28))
    disk.save("best")
    assert "remove a" not in disk.log
    disk.end("best")
    assert disk.log[-1] == "remove a"


def test_a_save_of_another_callback_takes_nothing_that_stays() -> None:
    disk = Disk()
    disk.save("best-1")
    disk.end("best-1")
    disk.save("best-2")
    disk.remove("best-1")
    disk.end("best-2", Error("RESOURCE_EXHAUSTED", "no space", 28))
    disk.save("latest")
    disk.end("latest")
    disk.order.wait()
    assert "remove best-1" not in disk.log


def test_a_removal_behind_a_save_that_has_failed_is_given_up_at_once() -> None:
    disk = Disk()
    disk.save("b")
    disk.end("b", Error("RESOURCE_EXHAUSTED", "no space", 28))
    disk.remove("a")
    disk.order.wait()
    assert disk.log == ["failed b"]


def test_a_save_whose_call_raises_removes_nothing() -> None:
    disk = Disk()
    disk.save("a")
    disk.end("a")

    def start() -> Any:
        raise Error("RESOURCE_EXHAUSTED", "no space", 28)

    with pytest.raises(Error, match="no space"):
        disk.order.save("b", start)
    disk.remove("a")
    disk.order.wait()
    disk.order.raise_error()  # the call has raised it
    assert disk.log == ["durable a"]


def test_the_only_checkpoint_can_be_removed_when_its_own_save_has_ended() -> None:
    disk = Disk()
    disk.save("scratch")
    disk.remove("scratch")
    assert disk.log == []
    disk.end("scratch")
    assert disk.log == ["durable scratch", "remove scratch"]


def test_a_removal_waits_for_the_save_of_its_path_too() -> None:
    disk = Disk()
    disk.save("a")
    disk.save("b")
    disk.remove("a")
    disk.end("b")
    assert disk.log == ["durable b"]
    disk.end("a")
    assert disk.log[-1] == "remove a"


def test_a_link_waits_for_its_target_and_holds_the_file_that_it_leaves() -> None:
    disk = Disk()
    disk.save("a")
    disk.end("a")
    disk.link("last", "a")
    disk.save("b")
    disk.remove("a")
    disk.end("b")
    assert disk.log == ["durable a", "link last a", "durable b"]  # the link still leads to a
    disk.link("last", "b")
    assert disk.log[-2:] == ["link last b", "remove a"]


def test_a_link_stays_when_the_save_of_its_target_fails() -> None:
    disk = Disk()
    disk.save("a")
    disk.end("a")
    disk.link("last", "a")
    disk.save("b")
    disk.remove("a")
    disk.link("last", "b")
    disk.end("b", Error("UNAVAILABLE", "the disk is gone", 5))
    disk.order.wait()
    assert disk.links == {"last": "a"} and "remove a" not in disk.log


@pytest.mark.planted("link_before_durability")
def test_the_planted_bug_links_before_the_target_is_durable_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Order, "link", lambda self, path, target, run: run())
    with pytest.raises(AssertionError):
        test_a_link_stays_when_the_save_of_its_target_fails()


def test_a_link_to_what_has_failed_is_given_up_at_once() -> None:
    disk = Disk()
    disk.save("a")
    disk.end("a", Error("UNAVAILABLE", "the disk is gone", 5))
    disk.link("last", "a")
    assert disk.links == {}


def test_links_of_one_name_keep_their_order() -> None:
    disk = Disk()
    disk.save("a")
    disk.link("last", "a")
    disk.save("b")
    disk.link("last", "b")
    disk.end("b")
    assert disk.log == ["durable b"]
    disk.end("a")
    assert disk.log[-2:] == ["link last a", "link last b"]


def test_a_removal_waits_for_a_link_that_was_asked_for_before_and_waits_for_another() -> None:
    disk = Disk()
    for step in ("2", "4", "6"):
        disk.save(step)
        if step != "2":
            disk.remove(str(int(step) - 2))
        disk.link("last", step)
    for step in ("4", "6", "2"):  # the first save ends last
        disk.end(step)
    disk.order.wait()
    links = ["durable 2", "link last 2", "link last 4", "link last 6"]
    assert [entry for entry in disk.log if entry in links] == links
    assert disk.log.index("remove 4") > disk.log.index("link last 6") and "remove 2" in disk.log
    disk.order.raise_error()


def test_a_path_that_is_saved_anew_is_not_removed() -> None:
    disk = Disk()
    disk.save("a")
    disk.end("a")
    disk.save("b")
    disk.remove("a")
    assert disk.order.is_leaving("a") and not disk.order.is_coming("a")
    disk.save("a")
    assert disk.order.is_coming("a") and not disk.order.is_leaving("a")
    disk.end("b")
    disk.end("a")
    disk.order.wait()
    assert "remove a" not in disk.log


@pytest.mark.parametrize("path", ["a", "b"])
def test_a_save_waits_for_one_of_its_path_and_for_the_bound(path: str) -> None:
    disk = Disk(saves_in_flight_max=9 if path == "a" else 1)
    disk.save("a")
    first = disk.saves["a"]
    thread = threading.Thread(target=disk.save, args=(path,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    _completion.end(first, None, None)
    thread.join(30)
    assert not thread.is_alive() and disk.saves[path] is not first
    disk.end(path)


def test_an_error_is_raised_once_with_the_others_in_its_notes() -> None:
    disk = Disk()
    for path in "abc":
        disk.save(path)
        disk.end(path, Error("UNAVAILABLE", f"save {path}: no", 5) if path != "b" else None)
    with pytest.raises(Error, match="save a: no") as caught:
        disk.order.raise_error()
    assert caught.value.__notes__ == ["and: save c: no [UNAVAILABLE]"]
    disk.order.raise_error()
    assert disk.saves["a"].seen and disk.saves["c"].seen


def test_a_removal_that_fails_is_an_error_and_holds_nothing_up() -> None:
    order = Order(9)

    def run() -> None:
        raise PermissionError("no")

    order.remove("a", run)
    order.remove("b", lambda: None)
    order.wait()
    with pytest.raises(PermissionError):
        order.raise_error()


def test_a_wait_ends_when_what_was_behind_the_saves_is_done() -> None:
    for _ in range(50):
        disk = Disk()
        disk.save("a")
        disk.remove("old")
        ender = threading.Thread(target=disk.end, args=("a",))
        ender.start()
        disk.order.wait()
        assert disk.log == ["durable a", "remove old"]
        ender.join()


def test_saves_that_end_at_one_time_run_each_removal_once() -> None:
    for _ in range(50):
        disk = Disk()
        for path in "abcd":
            disk.save(path)
            disk.remove(f"before {path}")
        threads = [threading.Thread(target=disk.end, args=(path,)) for path in "abcd"]
        for thread in threads:
            thread.start()
        disk.order.wait()
        assert sorted(line for line in disk.log if line.startswith("remove")) == [
            f"remove before {path}" for path in "abcd"
        ]
        for path in "abcd":
            assert disk.log.index(f"durable {path}") < disk.log.index(f"remove before {path}")
        for thread in threads:
            thread.join()


def test_what_held_a_removal_may_end_while_another_thread_asks_for_it() -> None:
    disk = Disk()
    asked, over, reasons = threading.Event(), threading.Event(), ["a logger was not told of it yet"]

    def why_held() -> str:
        reason = reasons[0]
        asked.set()
        over.wait(30)
        return reason

    disk.save("b")
    disk.order.remove("a", lambda: disk.log.append("remove a"), why_held)
    thread = threading.Thread(target=disk.end, args=("b",))
    thread.start()
    assert asked.wait(30)
    reasons[0] = ""
    disk.order.advance()
    over.set()
    disk.order.wait()
    thread.join()
    assert disk.log == ["durable b", "remove a"]


def test_loggers_are_told_in_the_order_of_the_saves() -> None:
    plugin, disk = CheckpointIO(), Disk()
    plugin.order = disk.order
    for path in "abc":
        disk.save(path)
        plugin.tell_when_durable(lambda path=path: disk.log.append(f"told {path}"))
    disk.end("c")
    plugin.deliver()
    disk.end("a", Error("RESOURCE_EXHAUSTED", "no space", 28))
    plugin.deliver()
    assert disk.log == ["durable c", "failed a"]
    disk.end("b")
    plugin.deliver()
    assert disk.log[2:] == ["durable b", "told b", "told c"]


def test_loggers_of_a_forked_child_do_not_wait_for_saves_of_its_parent() -> None:
    plugin, disk = CheckpointIO(), Disk()
    plugin.order = disk.order
    disk.save("parent's")
    plugin.tell_when_durable(lambda: disk.log.append("told of the parent's"))
    child = os.fork()
    if child == 0:
        disk.save("own")
        plugin.tell_when_durable(lambda: disk.log.append("told"))
        disk.end("own")
        plugin.deliver()
        os._exit(disk.log != ["durable own", "told"])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    disk.end("parent's")
    plugin.deliver()
    assert disk.log == ["durable parent's", "told of the parent's"]


def test_a_signal_handler_may_save_in_the_middle_of_a_wait() -> None:
    disk = Disk(saves_in_flight_max=1)
    disk.save("a")

    def handler(*_: Any) -> None:
        disk.end("a")
        disk.save("requeue")
        threading.Timer(0.05, disk.end, ("requeue",)).start()
        disk.order.wait_for("requeue")
        disk.log.append("requeue the job")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        disk.save("b")
    finally:
        signal.signal(signal.SIGUSR1, before)
    disk.end("b")
    assert disk.log == ["durable a", "durable requeue", "requeue the job", "durable b"]
