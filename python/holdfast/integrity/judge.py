"""The model of a round, and the invariants that hold after each life of its trainers.

i    what was told durable is there and verifies
ii   what any reader accepts is, bit for bit, what one save had at its call
iii  the newest checkpoint is the one whose save was called last
iv   no descriptor, mapping, process or partial file is left; no memory is reused before its last transfer
v    every failure has a cause, is told on every rank in bounded time, with a code, object and reason
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import time
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import holdfast
import holdfast.dcp
from holdfast import _names, files
from holdfast.integrity import corruption, excuses, megatron, readers, schedule

TIME_ORPHANS_MAX = 20.0  # seconds for which a recovery waits
NAMES = {
    "i": "what was reported durable is there and verifies",
    "ii": "what a reader accepts is what was sealed at the call",
    "iii": "the newest is the one that was saved last",
    "iv": "nothing is left behind, and nothing is used too early",
    "v": "failures are reported, with a cause, in bounded time",
}
OF_ERRORS = excuses.OF_ERRORS
# A worker that ended at its start for lack of room says so; the code is ABORTED, as of any worker that ends.
_WITHOUT_ROOM = "could not take its descriptors, or map its memory"
_OF_WORKER = "its worker"  # in the message of a save whose worker has ended
_BYTES = re.compile(r"differs in (?!1 of)\d+ of")  # of `states.difference`: more than one
_BESIDE_DATA = (_names.RECORD, _names.RECORD + _names.UNFINISHED, "ranks.board")  # the last two a crash may leave
_OF_DCP = (_names.DCP_ANY_DATA, _names.DCP_MANIFEST, _names.DCP_RECORD, _names.DCP_METADATA)
_NOT_RECOVERED = ("a save is running", "it cannot be removed")  # reasons to keep an entry that a recovery has to remove
# What a load says of a damaged checkpoint.
_OF_DAMAGE = {"DATA_LOSS", "FAILED_PRECONDITION", "NOT_FOUND"}


@dataclasses.dataclass
class Made:
    """One call of a save, on all ranks.

    Attributes:
        number, name, job: which one.
        generation: how often the directory had been moved away before.
        began, returned: the call, in nanoseconds; `returned` is infinite where it never did.
        outcomes: by rank: durable, failed, refused or skipped.
        ended: by rank: when the outcome was told.
        abandoned: its trainer went on from an older checkpoint; None where it went on from one of the other trainer, which
            may have left this one behind.
    """

    number: int
    name: str
    job: int
    generation: int
    began: float
    returned: float = float("inf")
    outcomes: dict[int, str] = dataclasses.field(default_factory=dict)
    abandoned: bool | None = False
    ended: dict[int, float] = dataclasses.field(default_factory=dict)

    @property
    def durable(self) -> bool:
        return "durable" in self.outcomes.values()

    @property
    def may_be_there(self) -> bool:
        return not (self.outcomes and set(self.outcomes.values()) <= {"refused", "skipped"}) or self.durable

    def end(self, line: dict[str, Any], outcome: str) -> None:
        self.outcomes[line["rank"]], self.ended[line["rank"]] = outcome, line["at"]

    def last(self, ranks: int) -> float:
        """When the last of so many ranks has told the outcome; infinite where one never did."""
        return max(self.ended.values()) if len(self.ended) >= ranks else float("inf")

    def is_durable_on(self, ranks: int) -> bool:
        """Whether so many ranks have told that it is durable."""
        return list(self.outcomes.values()) == ["durable"] * ranks


class Judge:
    """Follows one round.

    Args:
        round_: the round.
        directory: of its checkpoints.
    """

    def __init__(self, round_: dict[str, Any], directory: str) -> None:
        self.round = round_
        self.directory = directory
        self.format = schedule.format_of(round_)
        self.expected = readers.Expected(round_)
        self.problems: list[dict[str, str]] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.made: dict[int, Made] = {}
        self.may_mix_entries = False  # a file system without a journal: a name may be of another file after its repair
        self.called_late: set[int] = set()  # saves whose call may have been noted later than it was made
        self._moved: list[str] = []
        self._unsound: set[str] = set()  # paths of checkpoints that are not sound, undamaged
        self._standing: set[tuple[int, str]] | None = None  # generations and names of checkpoints; None: not known
        self._kept: dict[str, set[str]] = {}  # by directory, entries that its recovery has kept for its user
        self._restored: set[int] = set()  # saves of whose sealed memory a bit was changed, and changed back
        self._found: dict[str, int] = {}  # numbers of saves by the paths of checkpoints, undamaged
        self._actions = schedule.saves_of(round_)
        self._rung = round_["engine"]

    def blame(self, invariant: str, what: str) -> None:
        self.problems.append({"invariant": invariant, "what": what})

    @contextlib.contextmanager
    def blaming(self, what: str) -> Iterator[None]:
        """Blames an error within: checkpoints are found, recovered and read without one."""
        try:
            yield
        except holdfast.Error as error:
            self.blame("i", f"{what}: {error}")
        except Exception:
            self.blame("i", f"{what}: {traceback.format_exc()}")

    def count_event(self, kind: str, in_flight: bool) -> None:
        self.counts[f"event {kind}"] += 1
        if in_flight:
            self.counts[f"in flight {kind}"] += 1
            self.counts[f"in flight {kind} x {self.round['launcher']} x {self._rung}"] += 1

    # ---- What the trainers of a life told.

    def hear(self, lines: list[dict[str, Any]], actions: list[dict[str, Any]], errors: dict[str, int] | None = None) -> None:
        """Takes the lines of one life, what it was to do, and the errors of its file system, into the model."""
        self.counts.update({f"error {name}": number for name, number in (errors or {}).items()})
        # Each trainer has a pipe: what one told before the other may have been read after it.
        lines = sorted(lines, key=lambda line: line.get("at", float("inf")))
        to_judge: list[tuple[Made, dict[str, Any]]] = []
        self._rung = next((line["engine"] for line in lines if line.get("engine")), "") or self.round["engine"]
        missed = collections.Counter((line["job"], line["rank"], line["kind"]) for line in lines if line["event"] == "missed")
        for line in lines:
            event, number = line["event"], line.get("n", 0)
            made = self.made.get(number)
            if event == "call":
                made = self.made.setdefault(number, self._new(number, line))
                made.began = min(made.began, line["at"])
                self.counts["calls"] += 1
            elif event == "called" and made:
                made.returned = line["at"] if made.returned == float("inf") else max(made.returned, line["at"])
                if line["skipped"]:
                    made.end(line, "skipped")
                    to_judge.append((made, line))
                    self.counts["skipped"] += 1
            elif event == "fired" and missed[of := (line["job"], line["rank"], line["kind"])]:
                missed[of] -= 1
            elif event == "fired":
                self.count_event(line["kind"], line["phase"] not in ("call", "sealed", "done", "failed", "cancelled", "queued"))
            elif event == "moving" and os.path.isdir(line["to"]):
                self._moved.append(line["to"])
            elif event == "durable" and made:
                made.end(line, "durable")
                self.counts.update({"durable": 1, "bytes": self._actions[number]["spec"]["bytes"]})
                if os.path.basename(line["path"]) != made.name:
                    self.blame("i", f"save {number} of {made.name} was told durable as {line['path']}")
            elif event in ("failed", "refused") and made:
                if made.outcomes.get(line["rank"]) != "skipped":
                    made.end(line, event)
                    to_judge.append((made, line))
                    self.counts[event] += 1
            elif event == "loaded":
                self.counts["loads by trainers"] += 1
                self._note_load(line["job"], number)
                if line["different"]:
                    self.blame("ii", f"a trainer loaded {line['path']}: {line['different']}")
            elif event == "looked":
                self._look_at_dead_file(line)
            elif event == "leak":
                self.blame("iv", f"a trainer holds, after its saves: {line['more']}; what was ending then: {line.get('ending')}")
            elif event in ("hang", "wrong"):
                self.blame("v", line["what"])
            elif event == "crashed" or event == "not joined" and not _has_lost_a_rank(lines, line):
                if not errors or not all(map(_is_of_errors, line["errors"])):  # else its Checkpointer could not be made
                    self.blame("v", f"a trainer failed: {line['errors']}")
        found = excuses.Excuses(self.round, lines, actions, self.made, bool(errors), self._standing)
        self._restored.update(*(found.in_flight(line) for line in lines if line.get("kind") == "change-and-restore"))
        for made, line in to_judge:
            self._look_at_failure(made, line, found)
        for line in lines:
            if line["event"] == "unreadable":
                self._look_at_load(line, bool(errors))
        self._look_for_outcomes(lines)
        self._look_for_more_failures(to_judge, found)

    def _look_at_load(self, line: dict[str, Any], has_errors: bool) -> None:
        """A load of a trainer's that has failed."""
        candidates = {m.number for m in self.made.values() if m.name == os.path.basename(line.get("path", ""))}
        if has_errors and all(map(_is_of_errors, line["errors"])):
            self.counts["reads of trainers that the file system made fail"] += 1
        elif not self._may_be_damaged(candidates, str(line["errors"])):
            self.blame("ii", f"a trainer could not read: {line['errors']}")

    def _look_at_dead_file(self, line: dict[str, Any]) -> None:
        """What the transfers of a dead worker have left in its file."""
        self.counts["files of dead workers"] += 1
        self.counts["bytes in files of dead workers"] += line["written"]
        is_changed = self._actions[line["n"]].get("event", {}).get("kind") in ("change-sealed", "change-and-restore")
        if line["foreign"] and not is_changed:
            self.blame("iv", f"save {line['n']}, whose worker has died, wrote {line['foreign']} bytes into {line['file']} that it "
                       "never had")  # fmt: skip

    def _new(self, number: int, line: dict[str, Any]) -> Made:
        name = schedule.name_of(self.round, self._actions[number], line["job"])
        return Made(number, name, line["job"], len(self._moved), line["at"])

    def _look_at_failure(self, made: Made, line: dict[str, Any], excuse: excuses.Excuses) -> None:
        at, causes = line["at"], excuse.causes(made, line["at"])
        what = f"save {made.number} ({made.name}) {line['event']} on rank {line['rank']}"
        if line["event"] == "called":  # and skipped
            if self.round["when_full"] != "skip" or not excuse.may_wait(made, at) and causes <= set(schedule.HARMLESS):
                self.blame("v", f"save {made.number} ({made.name}) was skipped on rank {line['rank']} without a reason")
            return
        if line.get("skipped") and "skipped" in made.outcomes.values():
            return  # another rank's reason is looked at
        said, allowed = line["errors"], excuse.codes(made, at)
        for error in said or [{"ours": False}]:
            if "exit-trainer" in causes and error.get("type") == "Exiting":
                continue  # what ended another rank's call: its trainer was told to exit
            if "limit-memory" in causes and (error.get("type") == "MemoryError" or "DefaultCPUAllocator" in error.get("message", "")):
                continue  # Python's own, and PyTorch's
            if excuse.is_of_megatron(error, causes):
                continue
            if not error["ours"]:
                self.blame("v", f"{what} with what is no holdfast.Error: {said}")
                continue
            self.counts[f"code {error['code']}"] += 1
            if causes & {"limit-files", "limit-memory"} and error["code"] == "ABORTED" and _WITHOUT_ROOM in error["message"]:
                continue
            is_overtaken = error["code"] == "ABORTED" and _OF_WORKER not in error["message"] and excuse.may_be_overtaken(made, at)
            if not excuses.has_code(error, allowed, causes) and not is_overtaken:
                self.blame("v", f"{what} without a cause among {sorted(causes)}: {error}")
            elif causes - set(schedule.HARMLESS) == {"fault"} and error["errno"] not in excuse.errnos:
                self.blame("v", f"{what} with errno {error['errno']}, and not one of {sorted(excuse.errnos)}: {error}")
            elif not excuses.names_object(error, made.name):
                self.blame("v", f"{what} with a message that names no object: {error['message']}")

    def _look_for_outcomes(self, lines: list[dict[str, Any]]) -> None:
        """Every rank that reached its end has told how each of its saves ended."""
        ended = {(line["job"], line["rank"]) for line in lines if line["event"] == "end"}
        # Where a signal has ended the script, the outcome of the last save may not have been asked for.
        ended -= {(line["job"], line["rank"]) for line in lines if line["event"] == "exiting"}
        for line in lines:
            if line["event"] == "called" and (line["job"], line["rank"]) in ended:
                if line["rank"] not in self.made[line["n"]].outcomes:
                    self.blame("v", f"the outcome of save {line['n']} was never told on rank {line['rank']}")

    def _look_for_more_failures(self, told: list[tuple[Made, dict[str, Any]]], excuse: excuses.Excuses) -> None:
        """One fault fails one save: the next one works."""
        failed = {m.number for m, line in told if excuse.causes(m, line["at"]) - set(schedule.HARMLESS) == {"fault"}}
        if len(failed) > (faults := excuse.count("fault")):
            self.blame("v", f"{faults} faults failed the saves {sorted(failed)}")

    # ---- What is on the disk.

    def recover(self) -> None:
        """Recovers the directories."""
        for directory in self._directories():
            if os.path.isdir(directory):
                with self.blaming(f"the recovery of {directory} fails"):
                    self._kept[directory] = {
                        name for name, _, why in (kept.partition(": ") for kept in recover(directory)) if not why.startswith(_NOT_RECOVERED)
                    }

    def hear_ends(self, problem: str, left: dict[int, str]) -> None:
        """Blames what was wrong with the ends of a life's trainers, and processes that outlive them."""
        if problem:
            self.blame("v", problem)
        if left:
            self.blame("iv", f"processes that outlive their trainers: {left}")

    def _directories(self) -> list[str]:
        return [*self._moved, self.directory]

    def look(self, thorough: bool, damages: bool = True) -> None:
        """Holds what is there against the model.

        Args:
            thorough: after a recovery, without a save under way: read with every reader, and look for files that are left.
            damages: make those of the round, too, if it is thorough.
        """
        self._standing = set()
        for generation, directory in enumerate(self._directories()):
            with self.blaming(f"{directory} cannot be read"):
                self._look_at(directory, generation, thorough, damages)

    def _look_at(self, directory: str, generation: int, thorough: bool, damages: bool) -> None:
        complete: list[dict[str, Any]] = []
        if os.path.isdir(directory):
            complete = readers.complete(directory, self.format)
        found = {c["name"]: self.read(c, generation, thorough) for c in complete}
        if self._standing is not None:
            self._standing |= {(generation, name) for name in found}
        self._found |= {c["path"]: found[c["name"]] for c in complete}
        self.look_for_durable(directory, generation, found)
        if self.format != "file":
            self._look_at_newest(directory, generation, complete, found, thorough)
        if thorough and os.path.isdir(directory):
            self._look_for_left_files(directory, generation, complete, found)
        if thorough and damages:
            self._damage(complete)

    def _look_for_left_files(self, directory: str, generation: int, complete: list[dict[str, Any]], found: dict[str, int]) -> None:
        """After a recovery there are checkpoints and nothing else; beside a file its one manifest.

        Of DCP's directories those stay that hold nothing of a save, and those that the recovery names.
        """
        left = set(os.listdir(directory)) - {c["name"] for c in complete}
        if self.format == "file":
            for checkpoint in complete:
                left -= {os.path.basename(m) for m in files.manifests_of(checkpoint["path"])[:1]}
        elif self.format == "dcp":
            if self.may_mix_entries:  # the name of a directory that was removed leads to a file of another
                left = {entry for entry in left if os.path.isdir(os.path.join(directory, entry))}
            left -= self._kept.get(directory, set())
            of_dcp = {entry: _of_dcp(path) for entry in left if os.path.isdir(path := os.path.join(directory, entry))}
            left = left - of_dcp.keys() | {os.path.join(entry, name) for entry, names in of_dcp.items() for name in names}
        else:
            if self.may_mix_entries:
                left -= {entry for entry in self._kept.get(directory, ()) if not os.path.isdir(os.path.join(directory, entry))}
            left |= {os.path.join(c["name"], name) for c in complete for name in _unnamed_in(c["path"])}
        left -= {entry for entry in left if self._is_second_of_name(directory, generation, entry, found)}
        if left:
            self.blame("iv", f"after a recovery {directory} has {sorted(left)}")

    def _is_second_of_name(self, directory: str, generation: int, entry: str, found: dict[str, int]) -> bool:
        """Whether an entry is a whole save, killed before it took its name, and another save has the name.

        A recovery keeps both, and asks the user to rename one. This one is read under such a name.
        """
        match = _names.UNCOMMITTED.fullmatch(entry)
        if not match or match["kind"] != "partial":
            return False
        name = match["name"]
        untold = {m.number for m in self._saves(generation, name) if not m.outcomes} - {found.get(name)}
        if self.round["replace"] or name not in found or not untold:
            return False
        path, free = os.path.join(directory, entry), os.path.join(directory, f"{name}-second")
        os.rename(path, free)
        number = self.read({"path": free, "name": name}, generation, thorough=True)
        os.rename(free, path)
        self.counts["saves that were kept beside another of their name"] += 1
        return number in untold

    def _readers(self) -> dict[str, readers.Reader]:
        return readers.readers_of(self.format, self.round["door"])

    def _saves(self, generation: int, name: str | None = None) -> list[Made]:
        return [m for m in self.made.values() if m.generation == generation and name in (None, m.name)]

    def read(self, checkpoint: dict[str, Any], generation: int, thorough: bool) -> int:
        """Reads one checkpoint; returns the number of its save, 0 where it has none."""
        path, numbers, wrong = checkpoint["path"], set(), ""
        candidates = {m.number for m in self._saves(generation, checkpoint["name"]) if m.may_be_there}
        candidates |= self.called_late
        every = self._readers()
        for reader in list(every) if thorough else list(every)[:1]:
            of_others = not reader.startswith("holdfast")  # compares no digests
            try:
                for number, different in every[reader](path, self.expected):
                    numbers.add(number)
                    self.counts["reads"] += 1
                    if different:
                        wrong = f"{reader} of {path}, save {number}: {different}"
                        if not (of_others and self._may_be_damaged(candidates, f"DATA_LOSS: {different}")):
                            self.blame("ii", wrong)
                    elif number not in candidates:
                        self.blame("ii", f"{reader} of {path}: save {number}, not one of {sorted(candidates)}")
            except readers.Unknown as error:
                if not (of_others and self._may_be_damaged(candidates)):
                    self.blame("ii", f"{reader} of {path}: {error}")
            except BaseException as error:
                if readers.is_interrupt(error):
                    raise KeyboardInterrupt from error
                if not thorough and self._has_gone(checkpoint):
                    self.counts["checkpoints that an orphan removed while they were read"] += 1
                elif not self._may_be_damaged(candidates, "DATA_LOSS" if of_others else repr(error)):
                    self.blame("i", f"{reader} cannot read {path}, which is complete: {error!r}")
        if len(numbers) > 1:
            self.blame("ii", f"readers of {path} disagree: saves {sorted(numbers)}")
        if thorough:
            self._verify(path, candidates, wrong)
            self._look_for_config(path, numbers)
        return numbers.pop() if numbers else 0

    def _look_for_config(self, path: str, numbers: set[int]) -> None:
        """Without this file Megatron finds no checkpoint: a finalized save has it."""
        durable = any(n in self.made and self.made[n].durable for n in numbers)
        if self.round["door"] == schedule.MEGATRON and durable and not megatron.has_config(path):
            self.blame("i", f"{path} was told durable, and has no {megatron.CONFIG}")

    def _has_gone(self, checkpoint: dict[str, Any]) -> bool:
        return checkpoint not in readers.complete(os.path.dirname(checkpoint["path"]), self.format)

    def _may_be_damaged(self, candidates: set[int], said: str = "DATA_LOSS") -> bool:
        """Whether a byte of a save's sealed memory was another while it was written, and restored before the second digest.

        Only a save that reads its files back finds this. A load that compares digests finds it, too. A reader that compares
        none finds one byte that differs.
        """
        restored = not self._restored.isdisjoint(candidates) and _BYTES.search(said) is None
        found = restored and not self.round["read_back"] and "DATA_LOSS" in said
        self.counts["changes that were undone, and found"] += found
        return found

    def _verify(self, path: str, candidates: set[int], wrong: str) -> None:
        """`wrong`: what a reader that compares no digests has accepted."""
        verdict = readers.verdict(path, self.format)
        self.counts["verifications"] += 1
        if verdict != "sound":
            self._unsound.add(path)
        if verdict == "corrupt" and self._may_be_damaged(candidates):
            return
        if verdict != "sound":
            self.blame("i", f"{path}, which is complete, is {verdict}")
        elif wrong:
            self.blame("i", f"{path} is sound, and {wrong}")

    def look_for_durable(self, directory: str, generation: int, found: dict[str, int]) -> None:
        saves = sorted(self._saves(generation), key=lambda m: m.began)
        for name in {m.name for m in saves if m.durable}:
            last = max((m for m in saves if m.name == name and m.durable), key=lambda m: m.began)
            if self._may_be_removed(last, saves, found):  # and an earlier one may have taken the free name
                continue
            if name not in found:
                self.blame("i", f"save {last.number} was told durable, and {directory} has no {name}")
            elif found[name] in self.made and self.made[found[name]].returned < last.began:
                self.blame("i", f"{name} has save {found[name]}, though the later save {last.number} was durable")

    def _may_be_removed(self, made: Made, saves: list[Made], found: dict[str, int]) -> bool:
        """Whether retention may have removed it: enough checkpoints that go before it are there.

        These are the later ones of its series and, of an abandoned one, those that were not abandoned. To the retention of
        another trainer that saves the same series, what it has not loaded is an abandoned branch. A checkpoint whose save is
        not known counts.
        """
        keep = self.round["keep_last"]
        if not keep or self.round["one_name"] or self.round["door"] in (*schedule.OF_PATHS, "save_file"):
            return False
        series = made.name.rpartition("-")[0]
        of_another = self.round["same_names"] and any(m.job != made.job and m.may_be_there and m.returned > made.began for m in saves)
        gone = self._is_abandoned(made, saves) is not False
        there = [self.made.get(number) for name, number in found.items() if name.rpartition("-")[0] == series]
        before = [m for m in there if m is None or m.returned > made.began or of_another
                  or gone and self._is_abandoned(m, saves) is not True]  # fmt: skip
        return len(before) >= keep

    def _note_load(self, job: int, loaded: int) -> None:
        """Notes which saves of a trainer are abandoned, now that it has loaded a save; 0 is none."""
        for made in (m for m in self.made.values() if m.job == job and loaded):
            if loaded // schedule.SAVES_OF_JOB != job:
                made.abandoned = made.abandoned or None
            elif made.number > loaded:
                made.abandoned = True

    def _is_abandoned(self, made: Made, saves: list[Made]) -> bool | None:
        """Whether its trainer went on from an older checkpoint: it loaded one, or its steps went back. None: perhaps."""
        step = self._actions[made.number]["step"]
        went_back = any(
            m.job == made.job and m.began > made.began and m.may_be_there and self._actions[m.number]["step"] < step for m in saves
        )
        return went_back or made.abandoned

    def _look_at_newest(self, directory: str, generation: int, complete: list[dict[str, Any]],
                        found: dict[str, int], thorough: bool) -> None:  # fmt: skip
        if not complete:
            return
        newest, last = self._newest(directory)
        if newest["path"] != last["path"]:
            self.blame("iii", f"the newest of {directory} is {newest['name']}, the last of its list {last['name']}")
        if (newest["name"], newest.get("attempt")) not in {(c["name"], c.get("attempt")) for c in complete}:
            if thorough:
                self.blame("iii", f"the newest of {directory} is {newest['name']}, which was not in its list")
            self.counts["checkpoints that an orphan committed while they were read"] += 1
            return
        chosen = self.made.get(found.get(newest["name"], 0))
        for made in self._saves(generation):
            there = found.get(made.name) == made.number
            if chosen and made.durable and there and made.began > chosen.returned:
                self.blame("iii", f"the newest of {directory} is save {chosen.number}, though save {made.number} was called "
                           "later and is durable")  # fmt: skip

    def _newest(self, directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The newest checkpoint and the last of the list, with no commit of an orphan between the two."""
        before: list[dict[str, Any]] = []
        while True:
            newest = holdfast.find_newest(directory, format=self.format)
            after = holdfast.list_checkpoints(directory, format=self.format)
            if after == before:
                return newest, after[-1]
            before = after

    # ---- Damage.

    def _damage(self, complete: list[dict[str, Any]]) -> None:
        if schedule.place_of(self.round) == "quota":  # which counts overwritten bytes for a while: the repair may find no room
            return
        complete = [c for c in complete if c["path"] not in self._unsound]
        for i, given in enumerate(self.round["corruptions"] if complete else ()):
            checkpoint = complete[(given["key"] >> 4) % len(complete)]
            path, attempt = checkpoint["path"], checkpoint.get("attempt", "") if self.format == "dcp" else ""
            others = [c["path"] for c in complete if c["path"] != path]
            with corruption.damaged(path, attempt, others, given) as done:
                if not done:
                    continue
                self.counts[f"damage {given['kind']}"] += 1
                verdict = readers.verdict(path, self.format)
                if verdict == "sound":
                    self.blame("i", f"damage {i} ({done}): verifying {path} says that it is sound")
                self.load_damaged(path, done)
            if (verdict := readers.verdict(path, self.format)) != "sound":
                self.blame("i", f"damage {i} ({done}) was undone, and {path} is {verdict}")

    def load_damaged(self, path: str, done: str, besides: Collection[str] = ()) -> None:
        """A load raises, or the damage is in nothing that it gives.

        Args:
            path: of a checkpoint that `look` has found.
            done: what was done to it.
            besides: codes of errors that are right, beside those of damage.
        """
        own = {name: read for name, read in self._readers().items() if name.startswith("holdfast")}
        for reader, read in own.items():
            try:
                for number, different in read(path, self.expected):
                    right = self._found.get(path) or number
                    if different or number != right:
                        self.blame("ii", f"{done}: {reader} of {path}, which is save {right}, accepts it; save {number}: {different}")
            except holdfast.Error as error:
                if error.code not in {*_OF_DAMAGE, *besides}:
                    self.blame("v", f"{done}: {reader} of {path} raises {error!r}")
                self.counts["damage refused by a load"] += 1
            except readers.Unknown as error:
                self.blame("ii", f"{done}: {reader} of {path} accepts it; {error}")
            except BaseException as error:
                if readers.is_interrupt(error):
                    raise KeyboardInterrupt from error
                if not readers.is_own(error):
                    self.blame("v", f"{done}: {reader} of {path} raises {error!r}")
                self.counts["damage refused by a load"] += 1


def _has_lost_a_rank(lines: list[dict[str, Any]], of: dict[str, Any]) -> bool:
    """Whether an event has ended another rank of a trainer's job: one has the process group before the others have it."""
    return any(
        line["event"] == "fired" and line["kind"] in schedule.DEADLY and line["job"] == of["job"] and line["rank"] != of["rank"]
        for line in lines
    )


def _is_of_errors(error: dict[str, Any]) -> bool:
    """Whether it is what a file system that errs makes of a load; PyTorch makes an assertion of its own of some."""
    return error["code"] in OF_ERRORS or not error["ours"] and "Input/output error" in error["message"]


def _unnamed_in(path: str) -> list[str]:
    """Files in a plain checkpoint that its manifests do not name."""
    names = os.listdir(path)
    manifests = [name for name in names if _names.MANIFEST.fullmatch(name)]
    text = b"".join(Path(path, name).read_bytes() for name in manifests)
    return [name for name in names if name not in (*_BESIDE_DATA, *manifests) and f'"{name}"'.encode() not in text]


def _of_dcp(path: str) -> list[str]:
    """Files in a directory that are of a DCP save of this package. A whole data file without its manifest is of no known program."""
    names = [name for name in os.listdir(path) if not _names.DCP_ANY_DATA.fullmatch(name)]
    return [name for name in names if any(p.fullmatch(_names.finished(name)) for p in _OF_DCP)]


def recover(directory: str) -> list[str]:
    """Recovers a directory in which no process saves; returns the entries that stay, with reasons. Killed by some rounds, and run again.

    The ring of a killed process holds its locks for a moment. Only on local file systems a recovery waits for that.
    """
    end = time.monotonic() + TIME_ORPHANS_MAX
    while True:
        report = holdfast.recover(
            directory, wait_for_orphans=TIME_ORPHANS_MAX, silence_without_locks=1.0, age_without_locks=0.0
        )
        kept: list[str] = report["kept_incomplete"]
        if not any("a save is running" in why for why in kept) or time.monotonic() > end:
            return kept
        time.sleep(0.02)
