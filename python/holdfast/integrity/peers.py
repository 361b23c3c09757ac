"""The same rounds against other asynchronous savers: what of a campaign each of them survives.

A round is drawn as for Holdfast and reduced to what every saver offers: calls, waits, and events from outside. Holdfast's
own DCP door runs reduced rounds, too, so that a table compares the same schedules. What no other saver claims does not
count against one: verification, retention, recovery, errors with codes, and what a process keeps open.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import holdfast
import holdfast.dcp
from holdfast import _names
from holdfast._packages import is_installed
from holdfast.integrity import corruption, excuses, judge, megatron, readers, schedule, trainer
from holdfast.integrity.processes import send

# Events that need no hook in the saver. Those of workers need a worker process.
EVENTS = (
    "stop-trainer", "program", "limit-size", "limit-files", "kill-trainer", "terminate-trainer", "exit-trainer",
    "kill-in-call",
)  # fmt: skip
OF_WORKERS = ("stop-worker", "kill-worker", "terminate-worker")


def _stock(state: Any, path: str, process: bool) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    return dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=kind)


SAVERS: dict[str, Callable[[Any, str], Any]] = {
    "holdfast.dcp": lambda state, path: holdfast.dcp.async_save(state, checkpoint_id=path),
    "dcp-thread": lambda state, path: _stock(state, path, False),
    "dcp-process": lambda state, path: _stock(state, path, True),
}
# Their trainers are those of `callers`.
OUR_MEGATRON = "holdfast.megatron"
OF_MEGATRON = (OUR_MEGATRON, "megatron-persistent", "nvrx-persistent")
NAMES = (*SAVERS, *OF_MEGATRON)
_WITH_WORKER = ("holdfast.dcp", "dcp-process", *OF_MEGATRON)


def why_not(saver: str) -> str:
    """Why there is no such saver here; "" where there is one."""
    if saver not in NAMES:
        return f"there is no {saver}; there is {', '.join(NAMES)}"
    if saver in OF_MEGATRON and megatron.why_not():
        return f"{saver}: {megatron.why_not()}"
    if saver.startswith("nvrx") and not is_installed("nvidia_resiliency_ext"):
        return f"{saver}: nvidia-resiliency-ext is not installed"
    return ""


def reduce(round_: dict[str, Any], saver: str) -> dict[str, Any]:
    """The round for a saver: what it does not offer is left out, and the numbers stay."""
    made = copy.deepcopy(round_)
    made |= {
        "door": schedule.MEGATRON if saver in OF_MEGATRON else "dcp", "saver": saver, "jobs": 1, "same_names": False,
        "device": "cpu", "read_back": False, "second_look": False, "when_full": "wait", "keep_last": 0, "kill_recover": None,
        "launcher": "spawn", "engine": "auto", "forbidden": {}, "fuse": {},
    }  # fmt: skip
    kinds = EVENTS + (OF_WORKERS if saver in _WITH_WORKER else ())
    for actions in made["lives"]:
        offered = [a for a in actions if a["do"] in ("save", "wait", "load")]
        actions.clear()
        for action in offered:
            if action["do"] == "save":
                actions.append({"do": "wait"})  # two saves of PyTorch's at once mix up their collectives, which share a group
                action["rate"] = 0
                if "event" in action and action["event"]["kind"] not in kinds:
                    del action["event"]
                action.get("event", {}).pop("in_flight", None)  # no other saver tells how far it is
            actions.append(action)
    return made


class Trainer(trainer.Trainer):
    """A rank that saves with a saver of the table."""

    def _open(self, rate: int = 0) -> None:
        holdfast.configure(arena_bytes=4 * schedule.ARENA)

    def _set_rate(self, rate: int) -> None:
        pass

    def _settle(self, before: Any) -> None:
        pass

    def _call(self, action: dict[str, Any], state: dict[str, Any]) -> Any:
        os.makedirs(self.directory, exist_ok=True)
        return SAVERS[self.round["saver"]](state, os.path.join(self.directory, self.name_of(action)))

    def _begin_event(self, number: int, event: dict[str, Any]) -> None:
        if event["kind"] not in schedule.LIMITS:
            thread = threading.Thread(target=self._strike_later, args=(number, event), daemon=True)
            self.hits.append(thread)
            thread.start()

    def _strike_later(self, number: int, event: dict[str, Any]) -> None:
        """The moment is drawn: no other saver tells how far it is."""
        kind = event["kind"]
        time.sleep(event["seconds"])
        worker = self.worker(None) if kind in OF_WORKERS else None
        if number in self.over or (kind in OF_WORKERS and worker is None):
            return
        self.tell("fired", n=number, kind=kind, phase="call" if kind == "kill-in-call" else "writing", pid=worker)
        if kind == "stop-worker":
            send(worker, signal.SIGSTOP)
            time.sleep(event["seconds"])
            send(worker, signal.SIGCONT)
        if kind in ("kill-worker", "terminate-worker"):
            send(worker, signal.SIGKILL if kind == "kill-worker" else signal.SIGTERM)
        self.strike_trainer(kind, event["seconds"])


class Judge(judge.Judge):
    """Holds a saver to what any user expects: what reads as a checkpoint is one, and what was told durable is there."""

    def look(self, thorough: bool, damages: bool = True) -> None:
        """A directory with the framework's commit file is a checkpoint; the framework's reader decides."""
        if thorough and os.path.isdir(self.directory):
            with self.blaming(f"{self.directory} cannot be read"):
                self._look(damages)

    def _look(self, damages: bool) -> None:
        found = {}
        for name in sorted(os.listdir(self.directory)):
            path = os.path.join(self.directory, name)
            if os.path.exists(os.path.join(path, _names.METADATA)):
                found[name] = self.read({"path": path, "name": name}, 0, True)
        self.look_for_durable(self.directory, 0, found)
        if damages:
            self._damage_all([os.path.join(self.directory, name) for name in found])

    def recover(self) -> None:
        if self._is_ours:
            super().recover()

    def _verify(self, path: str, candidates: set[int], wrong: str) -> None:
        if self._is_ours:
            super()._verify(path, candidates, wrong)

    def _readers(self) -> dict[str, readers.Reader]:
        own = super()._readers()
        return own if self._is_ours else {k: v for k, v in own.items() if not k.startswith("holdfast")}

    @property
    def _is_ours(self) -> bool:
        return self.round["saver"].startswith("holdfast")

    def _look_at_failure(self, made: Any, line: dict[str, Any], excuse: excuses.Excuses) -> None:
        same = [m for m in self.made.values() if m.name == made.name and m is not made]
        if not excuse.kinds - set(schedule.HARMLESS) and not same:
            self.blame("v", f"save {made.number} {line['event']} without a cause: {line['errors']}")

    def _damage_all(self, paths: list[str]) -> None:
        """Damage is counted apart: without digests no saver can find it."""
        for given in self.round["corruptions"] if paths else ():
            path = paths[(given["key"] >> 4) % len(paths)]
            with corruption.damaged(path, "", [p for p in paths if p != path], given) as done:
                if done:
                    self.counts["peer damages"] += 1
                    self.counts["peer damages accepted"] += self._accepts(path)

    def _accepts(self, path: str) -> bool:
        """Whether a load gives other bytes than those of a save without an error."""
        reader = next(iter(self._readers().values()))
        try:
            return any(different for _, different in reader(path, self.expected))
        except readers.Unknown:
            return True
        except KeyboardInterrupt:
            raise
        except BaseException:  # as the framework's own
            return False


def row(saver: str, rounds: int, escapes: list[dict[str, Any]], counts: dict[str, int]) -> dict[str, Any]:
    """What one saver did in its rounds: those survived, and those that broke each invariant."""
    broken = [{p["invariant"] for p in escape["problems"]} for escape in escapes]
    return {
        "saver": saver, "rounds": rounds, "survived": rounds - len(broken),
        "lost": sum("i" in b for b in broken), "wrong": sum("ii" in b for b in broken),
        "hung": sum(bool(b & {"iv", "v"}) for b in broken), "saves": counts.get("calls", 0),
        "damages": counts.get("peer damages", 0), "accepted": counts.get("peer damages accepted", 0),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    head = ("saver", "rounds", "survived", "durable lost or unreadable", "wrong bytes accepted",
            "hung, failed without cause or left a process", "damaged files loaded as sound")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for r in rows:
        values = (r["saver"], r["rounds"], r["survived"], r["lost"], r["wrong"], r["hung"], f"{r['accepted']} of {r['damages']}")
        lines.append("| " + " | ".join(str(v) for v in values) + " |")
    return "\n".join(lines)
