"""A drain to a second directory that is broken or killed at one of its steps, and then runs again.

The second directory has two checkpoints at first. The drain replaces one of them, where the format has replacing, adds
a later one, and removes the oldest.
"""

from __future__ import annotations

import os
from typing import Any

import holdfast
from holdfast.drain import Drain
from holdfast.drain.following import Following
from holdfast.drain.places import open_place
from holdfast.integrity import jobs, judge, processes, readers
from holdfast.integrity.injection import Injector

FORMATS = ("holdfast", "dcp")
KEEP_LAST = 2
_ORPHANS_SECONDS = 60.0


def places(base: str) -> tuple[str, str]:
    """The directory of the saves, and the second one."""
    return os.path.join(base, "run"), os.path.join(base, "far")


def said(error: BaseException) -> str:
    """The message of one of the package's errors; another error with its type."""
    if isinstance(error, holdfast.Error):
        return f"[{error.code}] {error}"
    return f"{type(error).__name__}: {error}"


def drain(base: str) -> tuple[list[str], list[str]]:
    """Drains once. Also the body of the process that is broken.

    Returns:
        The names that arrived, and the messages of all errors.
    """
    events: list[dict[str, Any]] = []
    errors: list[str] = []
    source, far = places(base)
    try:
        refused = Following(open_place(source), open_place(far), Drain(keep_last=KEEP_LAST), events.append).sweep()
        errors += [said(refused)] if refused is not None else []
    except BaseException as error:
        errors.append(said(error))
    errors += [f"[{e['code']}] {e['message']}" for e in events if e["event"] in ("failed", "trouble")]
    return [e["name"] for e in events if e["event"] == "arrived"], errors


def prepare(round_: dict[str, Any], base: str, scratch: str) -> judge.Judge:
    """Makes both directories: the second has what was there after the first life of the round.

    Args:
        round_: has two lives.
        base: of `places`.
        scratch: for logs.
    """
    os.makedirs(base)
    made = judge.Judge(round_, places(base)[0])
    for life, actions in enumerate(round_["lives"]):
        orphans = processes.Orphans()
        trainers = jobs.Life(round_, life, made.directory, scratch)
        trainers.run()
        made.hear_ends(trainers.problem, orphans.wait(_ORPHANS_SECONDS))
        made.hear(trainers.lines, actions)
        if life == 0 and (errors := drain(base)[1]):
            made.blame("v", f"a drain without a fault failed: {errors}")
    return made


def _complete(made: judge.Judge, directory: str) -> list[dict[str, Any]]:
    return readers.complete(directory, made.format) if os.path.isdir(directory) else []


def _look(made: judge.Judge, directory: str, thorough: bool) -> list[str]:
    """Reads what is complete in the second directory; returns the names."""
    complete = _complete(made, directory)
    for checkpoint in complete:
        made.read(checkpoint, 0, thorough)
    return [c["name"] for c in complete]


def run(made: judge.Judge, base: str, injector: Injector) -> None:
    """Drains with an injection, then without one, and blames what is wrong.

    Args:
        made: of `prepare`.
        base: as it was left by `prepare`.
        injector: of the first drain.
    """
    source, far = places(base)
    told, status = jobs.run_injected(drain, (base,), injector, "drain")
    if wrong := injector.wrong_end(told is not None, status):
        made.blame("v", f"the process of the drain {wrong}")
    for error in told[1] if told else ():
        if not injector.fired:
            made.blame("v", f"a drain without a fault failed: {error}")
        elif not (error.startswith("[") and base in error):
            made.blame("v", f"a drain failed unclearly: {error}")
    made.look(thorough=False)  # the drain has changed nothing where it reads
    wanted = [c["name"] for c in _complete(made, source)][-KEEP_LAST:]
    names = _look(made, far, thorough=False)
    # A listing that passed one over delays its removal until the next drain.
    if told and not told[1] and not set(names) >= set(wanted):
        made.blame("i", f"a drain reported no error, and {far} has {names}, without all of {wanted}")
    # A file system without an exchange of names may lose one between two renames.
    if len(names) < KEEP_LAST and "EINVAL" not in injector.acts:
        made.blame("i", f"a broken drain left {names} in {far}, which had {KEEP_LAST} checkpoints")
    if errors := drain(base)[1]:
        made.blame("v", f"a drain after a broken one failed: {errors}")
    before = _identities(far)
    arrived, errors = drain(base)
    if arrived or errors or _identities(far) != before:
        made.blame("v", f"a second drain after a broken one sent {arrived}, with errors {errors}")
    with made.blaming(f"the recovery of {far} fails"):
        judge.recover(far)
    names = _look(made, far, thorough=True)
    if names != wanted:
        made.blame("i", f"after a broken drain and another one {far} has {names}, not {wanted}")
    if left := set(os.listdir(far)) - set(names):
        made.blame("iv", f"after a broken drain, another one and a recovery {far} has {sorted(left)}")


def _identities(directory: str) -> set[tuple[str, int, int]]:
    """Every file below a directory with its inode and its time."""
    found = set()
    for at, _, names in os.walk(directory):
        for name in names:
            status = os.stat(os.path.join(at, name))
            found.add((os.path.join(at, name), status.st_ino, status.st_mtime_ns))
    return found
