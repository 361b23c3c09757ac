"""Rounds: what is saved how, and what happens to it. A round is plain JSON, drawn from a seed and its number."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from holdfast.integrity import fuse_files, slow_disk

MIB = 1 << 20
PLAN = "plan"  # saves of a C++ program
MEGATRON = "megatron"
DOORS = ("save_async", "checkpointer", "dcp", "checkpointer-dcp", "save_file", PLAN, MEGATRON)
OF_PATHS = ("dcp", MEGATRON)  # save into a path of the framework's, without retention
OF_ONE_RANK = ("save_file", PLAN)  # the ranks of a program are drawn last of all
LAUNCHERS = ("spawn", "persistent", "fork", "thread")
ENGINES = ("auto", "io_uring-fixed", "io_uring", "pwrite")
# Kinds of events: those that a save must survive, those that may fail it, and those that end a trainer.
HARMLESS = ("stop-worker", "stop-trainer", "fork", "program")
HARMFUL = (
    "kill-worker", "terminate-worker", "hang-worker", "oom-worker", "cancel", "change-sealed", "change-and-restore",
    "lose-copy", "limit-size", "limit-files", "limit-memory",
)  # fmt: skip
DEADLY = ("kill-trainer", "kill-both", "terminate-trainer", "exit-trainer", "oom-trainer", "kill-in-call")
LEAVE_ORPHANS = ("kill-trainer", "terminate-trainer", "exit-trainer", "oom-trainer")
KILL_RECOVER = "kill-recover"  # of no save
EVENTS = (*HARMLESS, *HARMFUL, *DEADLY, KILL_RECOVER)
OF_WORKERS = ("stop-worker", "kill-worker", "terminate-worker", "hang-worker", "oom-worker", "kill-both")
IN_GROUPS = ("oom-worker", "oom-trainer")  # need a memory control group
LIMITS = ("limit-size", "limit-files", "limit-memory")
CHANGES = ("change-sealed", "change-and-restore")
# Calls that filters of containers refuse, with their errors; a save has another way to its end.
FORBIDDEN = (
    ("io_uring_setup", "EPERM"), ("io_uring_setup", "ENOSYS"), ("io_uring_register", "EPERM"), ("io_uring_enter", "EPERM"),
    ("clone3", "ENOSYS"), ("fsopen", "EPERM"), ("ioprio_set", "EPERM"), ("setpriority", "EPERM"),
    ("sched_setaffinity", "EPERM"), ("sync_file_range", "EPERM"), ("statx", "ENOSYS"), ("renameat2", "ENOSYS"),
    ("pidfd_send_signal", "EPERM"),
)  # fmt: skip
CORRUPTIONS = (
    "flip a bit", "zero a page", "truncate", "extend", "remove", "swap chunks", "swap files", "stale file",
)  # fmt: skip
PLACES = ("plain", "small", "quota", slow_disk.NAME, *(f"fuse-{kind}" for kind in fuse_files.KINDS))
MOUNTS = ("small", "quota", slow_disk.NAME, "fuse")  # what one kind of place needs and another does not
PHASES = ("writing", "commit", "later")
ARENA = 16 * MIB  # the least that there is
CHUNK = 4 * MIB  # written at once, whatever the rate
SAVES_OF_JOB = 1000  # numbers of the saves of the second trainer begin here


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a campaign may do.

    Attributes:
        ranks_max: processes of one job.
        mounts: file systems that can be mounted, of `MOUNTS`.
        bytes_max: size of the largest state.
        tensors_max: tensors of a state.
        kinds: event kinds to draw from; empty: all.
        engines: to draw from.
        groups: whether memory control groups can be made.
        filters: whether trainers can forbid themselves system calls.
        doors: to draw from; where none is for several ranks, jobs have one.
        places: of `PLACES`, to draw from; empty: most rounds are plain.
    """

    ranks_max: int = 8
    mounts: tuple[str, ...] = MOUNTS
    bytes_max: int = 8 * ARENA
    tensors_max: int = 100_000
    kinds: tuple[str, ...] = ()
    engines: tuple[str, ...] = ENGINES
    groups: bool = True
    filters: bool = True
    doors: tuple[str, ...] = DOORS[:-1]  # Megatron's needs more than this package
    places: tuple[str, ...] = ()


class _Drawing:
    """Draws one round."""

    def __init__(self, seed: int, number: int, limits: Limits) -> None:
        self.choose = random.Random(f"round {seed}:{number}")
        self.limits = limits
        self.round: dict[str, Any] = {"seed": seed, "number": number}
        self.saves = 0
        self.step = 0

    def often(self, share: float) -> bool:
        return self.choose.random() < share

    def pick(self, *weighted: tuple[Any, float]) -> Any:
        return self.choose.choices([w[0] for w in weighted], [w[1] for w in weighted])[0]

    def draw(self) -> dict[str, Any]:
        choose, made = self.choose, self.round
        for_all = [door for door in self.limits.doors if door not in OF_ONE_RANK]
        most = self.limits.ranks_max if for_all else 1
        made["ranks"] = min(most, self.pick((1, 12), (2, 4), (3, 1), (choose.randint(1, most), 1)))
        made["door"] = self._door()
        is_program = made["door"] == PLAN
        made["files"] = self.pick((1, 2), (2, 1), (5, 1)) if is_program else 1
        made["launcher"] = choose.choice(LAUNCHERS)
        made["engine"] = choose.choice(self.limits.engines)
        made["device"] = "stand-in" if self.often(0.15) else "cpu"
        made["jobs"] = 2 if made["ranks"] == 1 and self.often(0.12) else 1
        made["same_names"] = made["jobs"] == 2 and self.often(0.4)
        made["arena"] = self.pick((ARENA, 6), (ARENA * 3 // 2, 1), (4 * ARENA, 1))
        made["read_back"] = self.often(0.2)
        made["second_look"] = self.often(0.15)
        made["trainer_death"] = self.pick(("finish", 3), ("stop", 1))
        made["when_full"] = self.pick(("wait", 6), ("skip", 1), ("fail", 1))
        made["replace"] = self.often(0.4)
        made["one_name"] = made["replace"] and self.often(0.5)
        made["keep_last"] = self.pick((0, 3), (1, 1), (2, 2))
        made["disk"] = choose.choice((24, 40)) if "small" in self.limits.mounts and self.often(0.06) else 0
        forbidden = dict(choose.sample(FORBIDDEN, choose.randint(1, 3))) if self.often(0.07) else {}
        is_asked_for = "io_uring" in made["engine"]  # a save then takes no other way
        made["forbidden"] = {call: error for call, error in forbidden.items()
                             if self.limits.filters and not (is_asked_for and "io_uring" in call)}
        made["lives"] = [self._life(last=i == 1) for i in range(self.pick((1, 2), (2, 3)))]
        # A write of the store that the limit cuts short would hold the ranks up until their time-out.
        is_limited = any(event["kind"] == "limit-size" for event in events_of(made))
        made["store"] = "file" if self.often(0.15) and not is_limited else "server"
        is_wanted = KILL_RECOVER in self.limits.kinds
        made["kill_recover"] = round(choose.random() * 0.02, 4) if self.often(0.9 if is_wanted else 0.0 if self.limits.kinds else 0.15) else None
        made["kills_early"] = self.often(0.5)  # that recovery, beside orphans that still write
        if made["kills_early"] and made["kill_recover"] is not None:
            self._slow_orphans_down()
        made["corruptions"] = [
            {"kind": choose.choice(CORRUPTIONS), "key": choose.randrange(1 << 30)}
            for _ in range(self.pick((0, 1), (1, 3), (3, 1)))
        ]
        made["disk_kind"] = "quota" if self.often(0.3) and "quota" in self.limits.mounts else "small"
        if is_program and made["jobs"] == 1:
            self._draw_ranks_of_program()
        made["fuse"] = {}
        if self.limits.places:
            self._move_to(choose.choice(self.limits.places))
        elif not made["disk"]:
            if "fuse" in self.limits.mounts and self.often(0.06):
                self._move_to("fuse-" + choose.choice(fuse_files.KINDS))
            elif slow_disk.NAME in self.limits.mounts and self.often(0.04):
                self._move_to(slow_disk.NAME)
        return made

    def _slow_orphans_down(self) -> None:
        """Workers of trainers that have ended write for some time. Where the user asks for these kills, all lives end so."""
        for actions in self.round["lives"]:
            if KILL_RECOVER in self.limits.kinds:
                [a for a in actions if a["do"] == "save"][-1]["event"] = self._event(self.choose.choice(LEAVE_ORPHANS[:-1]))
            for action in actions:
                if action.get("event", {}).get("kind") in LEAVE_ORPHANS:
                    self.round["trainer_death"] = "finish"
                    action["rate"] = self.choose.choice((4, 8)) * MIB
                    action["spec"]["bytes"] = self.choose.randrange(9 * MIB, 15 * MIB)

    def _move_to(self, place: str) -> None:
        is_limited, (of, _, kind) = place in ("small", "quota"), place.partition("-")
        self.round["disk"] = (self.round["disk"] or self.choose.choice((24, 40))) if is_limited else 0
        self.round["disk_kind"] = place if is_limited else "small"
        self.round["fuse"] = fuse_files.draw(self.choose, kind) if of == "fuse" else {}
        if place == slow_disk.NAME:
            self.round["fuse"] = slow_disk.draw(self.choose)
        if kind in fuse_files.OF_TWO_MOUNTS and format_of(self.round) == "dcp":
            self.round["same_names"] = False  # two jobs commit in one DCP directory by a lock that both must see

    def _draw_ranks_of_program(self) -> None:
        """Behind what all doors draw, so that the rounds of other doors stay what they are."""
        choose, made, most = self.choose, self.round, self.limits.ranks_max
        ranks = made["ranks"] = min(most, self.pick((1, 8), (2, 4), (3, 1), (choose.randint(1, most), 2)))
        if ranks == 1:
            return
        made["when_full"] = "wait"  # without a process group, ranks do not agree to skip a save
        made["lives"] = [[a for a in actions if a["do"] not in ("move", "recover")] for actions in made["lives"]]
        for event in events_of(made):
            event["rank"] = choose.randrange(ranks)

    def _door(self) -> str:
        """Megatron's is drawn apart: a seed's other rounds are the same where there is none."""
        doors = self.limits.doors
        others = [d for d in doors if d != MEGATRON and (self.round["ranks"] == 1 or d not in OF_ONE_RANK)]
        drawn = self.choose.choice(others) if others else MEGATRON
        apart = random.Random(f"door {self.round['seed']}:{self.round['number']}")
        return MEGATRON if MEGATRON in doors and apart.random() < 1 / len(doors) else drawn

    def _life(self, last: bool) -> list[dict[str, Any]]:
        choose = self.choose
        count = self.pick((1, 2), (2, 3), (3, 3), (5, 1))
        actions: list[dict[str, Any]] = []
        if last and self.often(0.5):
            actions.append({"do": "load", "back": choose.randrange(3)})
            self.step = max(0, self.step - choose.randrange(3))  # the run goes on from there
        for i in range(count):
            actions.append(self._save(last=i == count - 1))
            if self.often(0.4):
                actions.append({"do": "wait"})
                if self.often(0.25) and self.round["ranks"] == self.round["jobs"] == 1:
                    actions.append({"do": "move"})
            elif self.often(0.1) and self.round["ranks"] == 1:
                actions.append({"do": "recover"})
            elif self.often(0.08) and self.round["ranks"] == self.round["jobs"] == 1 and format_of(self.round) != "dcp":
                actions.append({"do": "move", "beside": True})  # a save of DCP's fails then
        if any(map(_is_killed_in_call, actions)) and self.often(0.7):
            actions = [a for a, then in itertools.zip_longest(actions, actions[1:]) if a["do"] != "wait" or not _is_killed_in_call(then)]
        for before, action in itertools.pairwise(actions):
            # Beside the writes of the save before: one rate needs no wait between them, and both do not fit into the memory at once.
            if _is_killed_in_call(action) and before["do"] == "save":
                self.round["arena"] = ARENA
                before.pop("event", None)  # it may end the save
                before["rate"] = action["rate"] = choose.choice((8, 16)) * MIB
                for one in (before, action):
                    one["spec"]["bytes"] = choose.randrange(9 * MIB, 15 * MIB)
                action["event"]["seconds"] = round(choose.random() * 1.5, 3)
        return actions

    def _sizes(self, slow: bool) -> dict[str, Any]:
        """Small states for most saves: rounds are many. A slow save is longer than the piece that no rate holds back."""
        choose = self.choose
        often, seldom, large = (CHUNK + 99_000, 5 * MIB), (9 * MIB, 15 * MIB), (ARENA + MIB, self.limits.bytes_max)
        if not slow:
            often, seldom = (0, 300_000), (300_000, 9 * MIB)
        share = choose.random()
        nbytes = choose.randrange(*(large if share < 0.003 else seldom if share < 0.15 else often))
        tensors = self.pick((2, 4), (choose.randrange(2, 30), 4), (400, 0.2), (int(10 ** (3 + 3 * choose.random())), 0.002))
        if tensors > 400 and (self.round["door"] not in ("save_async", "checkpointer") or self.round["ranks"] > 1):
            tensors = 400  # planning so many as DTensors of some ranks takes minutes
        return {
            "bytes": nbytes,
            "tensors": min(tensors, self.limits.tensors_max),
            "wide": self.often(0.4),
            "objects": self.often(0.4),
        }

    def _save(self, last: bool) -> dict[str, Any]:
        choose = self.choose
        event: dict[str, Any] | None = None
        is_program = self.round["door"] == PLAN  # whose rounds cost little
        if self.often(0.9 if is_program else 0.75 if last else 0.35):
            kinds = [(k, 2.0) for k in HARMLESS] + [(k, 2.0) for k in HARMFUL if k != "hang-worker"]
            kinds += [("hang-worker", 2.0 if is_program else 0.4)] + ([(k, 3.0) for k in DEADLY] if last else [])
            refused = set() if self.limits.groups else set(IN_GROUPS)
            refused |= {"lose-copy"} if self.round["device"] == "cpu" else set()
            # PyTorch's gloo groups end a process that gets no memory for their threads, or no descriptor.
            if self.round["ranks"] > 1 or self.round["door"] == MEGATRON:
                refused |= {"limit-memory", "limit-files"} if format_of(self.round) == "dcp" else {"limit-memory"}
            allowed = [k for k in kinds if (not self.limits.kinds or k[0] in self.limits.kinds) and k[0] not in refused]
            if allowed:
                event = self._event(self.pick(*allowed))
        self.saves += 1
        self.step += 1
        action = {"do": "save", "n": self.saves, "step": self.step, "mutate": self.often(0.95)}
        slow = event is not None and event["phase"] in ("writing", "commit", "later") and self.often(0.85)
        action["rate"] = choose.choice((16, 32, 64)) * MIB if slow else 0
        action["spec"] = self._sizes(slow)
        if event:
            action["event"] = event
        return action

    def _event(self, kind: str) -> dict[str, Any]:
        choose = self.choose
        event = {
            "kind": kind,
            "rank": choose.randrange(self.round["ranks"]),
            "phase": self.pick(("writing", 6), ("commit", 2), ("later", 1)),
            "share": round(choose.random() * 0.8, 2),
            "seconds": round(choose.random() * 0.15, 3),
        }
        if kind in (*LIMITS, *CHANGES) and self.often(0.7):
            # At the phase, and not at the call or the seal. PyTorch's own threads end a process that gets no memory.
            event["in_flight"] = kind != "limit-memory" or self.round["door"] == PLAN
            event["place"] = round(choose.random() * 0.99, 2)  # of a change, among the extents that are sealed
        if kind == "limit-size":
            event["bytes"] = choose.choice((4096, MIB, 5 * MIB, 9 * MIB))
        if kind == "limit-memory":  # beyond what the trainer has
            # Without any a C++ program ends: also its library's threads make small objects.
            least = MIB if self.round["door"] == PLAN else 0
            event["bytes"] = max(least, choose.choice((0, MIB, 9 * MIB, 20 * MIB, 40 * MIB, 80 * MIB)))
        return event


def _is_killed_in_call(action: dict[str, Any] | None) -> bool:
    return action is not None and action.get("event", {}).get("kind") == "kill-in-call"


def draw(seed: int, number: int, limits: Limits) -> dict[str, Any]:
    """The round of a seed with a number, always the same."""
    return json.loads(json.dumps(_Drawing(seed, number, limits).draw()))


def saves_of(round_: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The save actions of a round by their numbers, of both trainers."""
    found = {}
    for actions in round_["lives"]:
        for action in actions:
            if action["do"] == "save":
                for job in range(round_["jobs"]):
                    found[action["n"] + job * SAVES_OF_JOB] = action
    return found


def format_of(round_: dict[str, Any]) -> str:
    """What a round's saves write: directories of "holdfast" or "dcp", or a "file" each."""
    if round_["door"] == "save_file":
        return "file"
    return "dcp" if "dcp" in round_["door"] or round_["door"] == MEGATRON else "holdfast"


def name_of(round_: dict[str, Any], action: dict[str, Any], job: int) -> str:
    """Name of the directory, or the file, of a save."""
    series = "other" if job and not round_["same_names"] else "step"
    ending = ".pt" if format_of(round_) == "file" else ""
    return f"{series}-latest{ending}" if round_["one_name"] else f"{series}-{action['step']}{ending}"


def place_of(round_: dict[str, Any]) -> str:
    """Where a round is, of `PLACES`."""
    if round_["fuse"]:
        kind = str(round_["fuse"]["kind"])
        return kind if kind == slow_disk.NAME else f"fuse-{kind}"
    return str(round_["disk_kind"]) if round_["disk"] else "plain"


def events_of(round_: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a round."""
    return [a["event"] for a in saves_of(round_).values() if "event" in a]


_DEFAULTS = {
    "ranks": 1, "jobs": 1, "same_names": False, "device": "cpu", "read_back": False, "second_look": False,
    "when_full": "wait", "keep_last": 0, "disk": 0, "kill_recover": None, "kills_early": False, "arena": ARENA, "corruptions": [],
    "engine": "auto", "launcher": "spawn", "one_name": False, "replace": False, "door": "save_async", "store": "server",
    "forbidden": {}, "disk_kind": "small", "files": 1, "fuse": {},
}  # fmt: skip


def smaller(round_: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rounds that are one piece simpler, the largest pieces first."""
    for i in reversed(range(len(round_["lives"]))):
        if len(round_["lives"]) > 1:
            made = copy.deepcopy(round_)
            del made["lives"][i]
            yield made
    for i, actions in enumerate(round_["lives"]):
        for k in reversed(range(len(actions))):
            if len(actions) > 1:
                made = copy.deepcopy(round_)
                del made["lives"][i][k]
                yield made
    for key, value in _DEFAULTS.items():
        if round_.get(key, value) != value:
            made = {**copy.deepcopy(round_), key: copy.copy(value)}
            if key == "ranks":
                for event in events_of(made):
                    event["rank"] = 0
            if key == "replace":
                made["one_name"] = False
            yield made
    for i, actions in enumerate(round_["lives"]):
        for k, action in enumerate(actions):
            if action["do"] != "save":
                continue
            if action.get("event"):
                made = copy.deepcopy(round_)
                del made["lives"][i][k]["event"]
                yield made
            if action.get("rate"):
                made = copy.deepcopy(round_)
                made["lives"][i][k]["rate"] = 0  # the C++ program wants one
                yield made
            spec = action["spec"]
            for less in ({"tensors": 2}, {"bytes": 4096}, {"wide": False}, {"objects": False}):
                if {**spec, **less} != spec:
                    made = copy.deepcopy(round_)
                    made["lives"][i][k]["spec"] = {**spec, **less}
                    yield made
