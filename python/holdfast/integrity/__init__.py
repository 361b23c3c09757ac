"""The program ``integrity-fuzz``: random saves under attack, each held against a model, on a machine of the user's.

Trainers are processes of their own, with real workers and real files. What each save had at its call is computed again
from the seed, so that no expectation is kept where the attack could reach it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import json
import os
import platform
import random
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from holdfast import __version__

ESCAPED = 1
TROUBLE = 2
INTERRUPTED = 130

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_EPILOG = """\
exit status: 0 nothing escaped, 1 something did, 2 trouble, 130 interrupted (the report has what was done)

examples:
  integrity-fuzz --time 1h --dir /mnt/checkpoints --report report.json
  integrity-fuzz --resume report.json --time 8h
  integrity-fuzz --seed 7 --first 1234 --rounds 1 --dir /mnt/checkpoints
"""


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seconds, or 5m, 2h, 1d")
    return float(match[1]) * _UNITS[match[2]]


def _parser() -> argparse.ArgumentParser:
    from holdfast.integrity import processes

    parser = argparse.ArgumentParser(
        "integrity-fuzz", description="Attacks saves on this machine and this file system, and proves every checkpoint.",
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--version", action="version", version=f"integrity-fuzz {__version__}")
    add("--dir", default="", help="a directory on the file system to try (default: the system's temporary one)")
    add("--rounds", type=int, help="end after so many rounds (default: 100, without --time)")
    add("--time", type=_seconds, metavar="T", help="end after this time, and at least one round: 90, 10m, 8h")
    add("--seed", type=int, help="of all rounds (default: a fresh one, which is printed)")
    add("--first", type=int, default=0, metavar="N", help="number of the first round (default: 0)")
    add("--jobs", type=int, default=min(8, 2 * processes.cpus()), metavar="N",
        help="rounds, or runs of --faults and --kills, beside each other; most of their time is waiting (default: twice "
        "the CPUs, at most 8)")  # fmt: skip
    add("--ranks", type=int, default=8, help="processes of the largest jobs (default: 8)")
    add("--tensors", type=int, default=100_000, help="tensors of the largest states, which are rare (default: 100000)")
    add("--bytes", type=int, default=128, metavar="MIB", help="size of the largest states, which are rare (default: 128; "
        "the staging memory has 16)")  # fmt: skip
    add("--doors", default="", metavar="NAME,...", help="draw only rounds of these doors: save_async, checkpointer, dcp, "
        "checkpointer-dcp, save_file, plan, megatron")  # fmt: skip
    add("--events", default="", metavar="KIND,...", help="draw only these kinds of events")
    add("--engines", default="", metavar="NAME,...", help="draw only these engines: auto, io_uring-fixed, io_uring, pwrite")
    add("--places", default="", metavar="NAME,...", help="draw only rounds in these places: plain, small, quota, slow-disk, "
        "fuse-errs, fuse-locks, fuse-late, fuse-slow, fuse-forgets; of --faults and --kills: slow-disk")  # fmt: skip
    add("--no-mount", action="store_true", help="mount no file systems, even as root")
    add("--shrink", type=_seconds, default=120.0, metavar="T", help="longest time to simplify a failing round "
        "(default: 2m)")  # fmt: skip
    add("--report", default="", metavar="FILE", help="write a JSON report there after each round")
    add("--resume", default="", metavar="FILE", help="go on from this report, and write it")
    add("--replay", default="", metavar="JSON", help="run one schedule, as an escape prints it; @FILE reads it")
    add("--repeat", type=int, default=1, metavar="N", help="run the schedule of --replay so often")
    add("--savers", default="", metavar="NAME,...", help="compare savers by the same rounds: holdfast.dcp, dcp-thread, "
        "dcp-process, holdfast.megatron, megatron-persistent, nvrx-persistent; prints a table")  # fmt: skip
    add("--power-cuts", default="", metavar="FS,...", help="run the rounds on recorded disks with these file systems "
        "(ext4, ext4-nojournal, xfs, btrfs), and judge what a power cut at any moment leaves; needs root")  # fmt: skip
    add("--recorder", default="fuse", choices=("fuse", "log-writes"), help="what records the disks of --power-cuts: a server "
        "of this program, or device-mapper's target (default: fuse)")  # fmt: skip
    add("--bad-disks", default="", metavar="FS,...", help="run the rounds on disks that run out of room, "
        "lose or refuse writes from a moment on, misread, or are late; needs root, and all but the first device-mapper")  # fmt: skip
    add("--resets", default="", metavar="FS", help="run the rounds on --disk, and tell --witness, until the machine is reset")
    add("--disk", default="", metavar="DEVICE", help="of --resets; its content is lost")
    add("--witness", default="", metavar="FILE", help="of --resets; a serial line or a pipe that leads out of the machine")
    add("--after", action="store_true", help="judge the disk of --resets after the reset, by a copy of what the witness got")
    add("--plant", default="", help=argparse.SUPPRESS)  # MODULE:FUNCTION, a mistake of the trainers
    add("--cuts", type=int, metavar="N", help="cuts of a round at drawn moments, beside those at each flush (default: before each "
        "flush three, with the first, some, and some and one in part of the writes that were not flushed)")  # fmt: skip
    add("--faults", action="store_true", help="make each system call of scripts of saves, recoveries and loads fail with each "
        "error, once")  # fmt: skip
    add("--kills", action="store_true", help="kill trainers, workers, recoveries and readers of these scripts at each call")
    add("--scripts", default="", metavar="NAME,...", help="only these scripts of --faults and --kills")
    add("--per-script", type=int, default=0, metavar="N", help="so many runs of each script, drawn (default: all)")
    add("--pairs", action="store_true", help="two faults or kills in each run")
    add("--json", action="store_true", help="print the report as JSON in place of the summary")
    return parser


def _check(option: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Raises ValueError for names that are not known."""
    if unknown := set(names) - set(known):
        raise ValueError(f"{option}: there is no {', '.join(sorted(unknown))}; there is {', '.join(known)}")


def _chosen(option: str, given: str, known: Iterable[str]) -> tuple[str, ...]:
    """What an option lists; without a name, all are meant."""
    names = tuple(name for name in given.split(",") if name)
    _check(option, names, known)
    return names


def _limits(arguments: argparse.Namespace) -> Any:
    from holdfast.integrity import injection, memory_groups, native, schedule

    doors = _chosen("--doors", arguments.doors, schedule.DOORS)
    for door, reason in native.missing().items():
        if door in doors and reason:
            raise ValueError(f"--doors {door}: {reason}")
    asked = _chosen("--places", arguments.places, schedule.PLACES)
    no_mount = _no_mount(arguments)
    for place in set(asked) - {"plain"}:
        if reason := no_mount.get("fuse" if place.startswith("fuse-") else place, ""):
            raise ValueError(f"--places: {place}: {reason}")
    if arguments.ranks < 1 or arguments.bytes < 18 or arguments.tensors < 2:
        raise ValueError("--ranks is at least 1, --bytes at least 18, --tensors at least 2")
    return schedule.Limits(
        ranks_max=arguments.ranks, tensors_max=arguments.tensors, bytes_max=arguments.bytes << 20,
        kinds=_chosen("--events", arguments.events, schedule.EVENTS),
        engines=_chosen("--engines", arguments.engines, schedule.ENGINES) or schedule.ENGINES,
        mounts=tuple(kind for kind in schedule.MOUNTS if kind not in no_mount), places=asked,
        groups=not memory_groups.why_not(), filters=not injection.why_not(), doors=doors or native.doors(),
    )  # fmt: skip


def _no_mount(arguments: argparse.Namespace) -> dict[str, str]:
    """The file systems of `schedule.MOUNTS` that cannot be mounted, and why."""
    from holdfast.integrity import places, schedule

    given = "mounting a file system needs root, and no --no-mount" if arguments.no_mount else ""
    reasons = {kind: given or places.why_not(kind) for kind in schedule.MOUNTS}
    return {kind: reason for kind, reason in reasons.items() if reason}


def _read(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _campaign(arguments: argparse.Namespace, scratch: str, saver: str = "") -> Any:
    from holdfast.integrity import campaign

    given = _read(arguments.resume) if arguments.resume else {}
    directory = arguments.dir or given.get("directory") or scratch
    os.makedirs(directory, exist_ok=True)
    tell = _on_stderr if arguments.json else print
    made = campaign.Campaign(directory, _seed(arguments), _limits(arguments), arguments.report or arguments.resume, tell, saver,
                             arguments.plant, directory != scratch, _options(arguments))  # fmt: skip
    made.next = arguments.first
    if given:
        made.resume(given)
        if arguments.first or arguments.seed not in (None, made.seed) or made.directory not in (given["directory"], scratch):
            raise ValueError(f"--resume {arguments.resume} goes on with seed {made.seed} in {given['directory'] or 'no --dir'}: "
                             "leave out --seed, --first and --dir, or begin another report with --report")  # fmt: skip
    tell(f"seed {made.seed}, in {made.directory}")
    if not arguments.no_mount:
        for kind, reason in _no_mount(arguments).items():
            tell(f"no rounds on file systems of the kind {kind}: {reason}")
    return made


def _seed(arguments: argparse.Namespace) -> int:
    return arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)


def _options(arguments: argparse.Namespace) -> str:
    """The options that decide, beside a seed, which rounds are drawn."""
    default = _parser().parse_args([])
    names = ("ranks", "tensors", "bytes", "doors", "events", "engines", "places")
    given = [f"--{name} {value}" for name in names if (value := getattr(arguments, name)) != getattr(default, name)]
    return " ".join([*given, *["--no-mount"] * arguments.no_mount])


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _replayed(text: str) -> Any:
    return _read(text[1:]) if text.startswith("@") else json.loads(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="integrity-fuzz-") as scratch:
            return _run(arguments, scratch)
    except Exception as error:
        _tell_trouble(error)
    return TROUBLE


def _tell_trouble(error: Exception) -> None:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        _on_stderr("integrity-fuzz: this needs PyTorch; install torch")
    elif isinstance(error, (OSError, ValueError)):
        _on_stderr(f"integrity-fuzz: {error}")
    else:
        traceback.print_exception(error)


def _run_to_the_end(run: Callable[[], object]) -> int:
    """Runs a campaign; returns the status where it has found no escape. Its report follows in any case."""
    try:
        run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        _tell_trouble(error)
        return TROUBLE
    return 0


def _count(arguments: argparse.Namespace) -> int | None:
    return arguments.rounds if arguments.rounds is not None or arguments.time is not None else 100


def _compare(arguments: argparse.Namespace, scratch: str) -> int:
    """Runs the same rounds with each saver and prints a table; the status is that of Holdfast's rounds."""
    from holdfast.integrity import peers

    savers = arguments.savers.split(",")
    if reason := next(filter(None, map(peers.why_not, savers)), ""):
        raise ValueError(f"--savers: {reason}")
    arguments.seed = _seed(arguments)
    rows, status, escaped = [], 0, False
    for saver in savers:
        made = _campaign(arguments, scratch, saver)
        status = _run_to_the_end(functools.partial(made.run, _count(arguments), arguments.time, 0.0, arguments.jobs))
        rows.append(peers.row(saver, made.done, made.escapes, made.counts))
        escaped |= bool(made.escapes) and saver.startswith("holdfast")
        if status:
            break
    print(json.dumps(rows, indent=1) if arguments.json else peers.table(rows))
    return ESCAPED if escaped else status


def _break_disks(arguments: argparse.Namespace) -> int:
    """Runs rounds on disks that are recorded, bad or reset; the status says whether one was left as it must not."""
    from holdfast.integrity import bad_disks, campaign, device_mapper, jobs, power_cuts, processes, resets, schedule
    from holdfast.integrity.block_recorder import RECORDERS

    option, given, targets = next(
        (option, given, targets)
        for option, given, targets in (
            ("--bad-disks", arguments.bad_disks, []),
            ("--resets", arguments.resets, []),
            ("--power-cuts", arguments.power_cuts, ["log-writes"] * (arguments.recorder == "log-writes")),
        )
        if given
    )
    kinds = given.split(",")
    _check(option, kinds, power_cuts.SIZES)
    if os.geteuid() != 0:
        raise PermissionError(f"{option}: mounting the disks needs root")
    if targets and (reason := device_mapper.why_not(*targets)):
        raise OSError(f"{option}: {reason}")
    absent = [attack for attack in bad_disks.ATTACKS if arguments.bad_disks and bad_disks.why_not(attack)]
    if absent:
        _on_stderr(f"integrity-fuzz: no rounds on disks of the kinds {', '.join(absent)}: {bad_disks.why_not(absent[0])}")
    if arguments.resets and not (arguments.disk and arguments.witness and arguments.seed is not None):
        raise ValueError("--resets needs --disk, --witness and --seed")
    seed, given_round = _seed(arguments), _replayed(arguments.replay) if arguments.replay else {}
    began, counts, escapes = time.monotonic(), collections.Counter[str](), 0
    limits, rounds_max = _limits(arguments), _count(arguments)
    draw = functools.partial(_same, given_round) if given_round else functools.partial(schedule.draw, seed, limits=limits)
    numbers: Iterable[int] = itertools.islice(itertools.count(arguments.first), rounds_max)
    if given_round:
        seed, numbers = given_round["seed"], itertools.repeat(given_round["number"], max(1, arguments.repeat))
    end = None if arguments.time is None else began + arguments.time
    at_once = min(arguments.jobs, processes.cpus())
    again = f" --plant {arguments.plant}" if arguments.plant else ""
    made: Iterator[tuple[int, str, Any]]
    if arguments.resets:
        if not arguments.after:
            resets.run(given, arguments.disk, arguments.witness, seed, limits, arguments.first, arguments.plant)
        made = iter(resets.judge(given, arguments.disk, arguments.witness, seed, limits))
        again += f" --disk {arguments.disk} --witness {arguments.witness} --seed {seed} {_options(arguments)} --after"
    else:
        if arguments.bad_disks:
            one = functools.partial(bad_disks.drawn, draw, arguments.plant)
        else:
            one = functools.partial(power_cuts.drawn, draw, arguments.cuts, RECORDERS[arguments.recorder], arguments.plant)
            again += f" --cuts {arguments.cuts}" * (arguments.cuts is not None) + f" --recorder {arguments.recorder}"
        if at_once > 1:
            jobs.preload(limits.doors)
        made = power_cuts.campaign(functools.partial(power_cuts.Bench, one, limits.doors), kinds, numbers, end, at_once)
    print(f"seed {seed}", flush=True)
    seen: set[int] = set()

    def as_json() -> dict[str, Any]:
        return {"kernel": f"{platform.system()} {platform.release()}", "seed": seed, "rounds": len(seen), "escapes": escapes,
                "seconds": round(time.monotonic() - began),
                "states": {k: n for k, n in sorted(counts.items()) if k.startswith("states ")},
                "counts": {k: n for k, n in sorted(counts.items()) if not k.startswith("states ")}}  # fmt: skip

    def run() -> None:
        nonlocal escapes
        for number, kind, result in made:
            seen.add(number)
            counts.update(result.counts)
            counts[f"escapes {kind}"] += len(result.problems)
            escapes += len(result.problems)
            for problem in result.problems:
                print(f"ESCAPE in round {number}: ({problem['invariant']}) {problem['what']}")
            if result.problems:
                replay = "" if arguments.resets else f" --replay {campaign.as_argument(draw(number))}"
                print(f"reproduce: integrity-fuzz {option} {kind}{again}{replay}", flush=True)
            _write(arguments.report, as_json())

    status = _run_to_the_end(run)
    report = as_json()
    print(json.dumps(report, indent=1) if arguments.json else "\n".join(f"{k}: {v}" for k, v in report.items()))
    return ESCAPED if escapes else status


def _same(round_: dict[str, Any], _: int) -> dict[str, Any]:
    return round_


def _write(path: str, report: dict[str, Any]) -> None:
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


def _break_steps(arguments: argparse.Namespace, scratch: str) -> int:
    """Faults and kills at every step of scripts; the status says whether one had a result that it must not."""
    from holdfast.integrity import injection, steps

    names = _chosen("--scripts", arguments.scripts, steps.NAMES)
    if reason := injection.why_not():
        raise OSError(f"--faults, --kills: {reason}")
    base = arguments.dir or scratch
    with _slow_disk(arguments, base) if arguments.places else contextlib.nullcontext(base) as directory:
        return _run_steps(arguments, directory, names)


@contextlib.contextmanager
def _slow_disk(arguments: argparse.Namespace, base: str) -> Iterator[str]:
    """A disk for --faults and --kills on which writes outlive their process."""
    from holdfast.integrity import places, slow_disk

    if arguments.places != slow_disk.NAME:
        raise ValueError(f"--places {arguments.places}: --faults and --kills run in the directory, or on {slow_disk.NAME}")
    if arguments.no_mount:
        raise ValueError("--no-mount leaves no slow disk to --places")
    os.makedirs(base, exist_ok=True)
    if reason := places.why_not(slow_disk.NAME):
        raise OSError(f"--places {slow_disk.NAME}: {reason}")
    with tempfile.TemporaryDirectory(prefix="holdfast-steps-", dir=base) as at, places.made(
        {"fuse": slow_disk.draw(random.Random(1))}, at
    ) as place, place.hostile():
        yield place.directory


def _run_steps(arguments: argparse.Namespace, directory: str, names: tuple[str, ...]) -> int:
    from holdfast.integrity import steps

    seed, options = _seed(arguments), f" --dir {shlex.quote(os.path.abspath(arguments.dir))}" if arguments.dir else ""
    options += f" --places {arguments.places}" if arguments.places else ""
    options += f" --plant {arguments.plant}" if arguments.plant else ""
    made = steps.Campaign(directory, seed, names, arguments.faults, arguments.kills, arguments.pairs, options, arguments.plant)
    tell = _on_stderr if arguments.json else print
    if _is_step(arguments.replay):
        run = functools.partial(made.replay, arguments.replay, max(1, arguments.repeat), tell)
    else:
        tell(f"seed {seed}")
        run = functools.partial(made.run, arguments.rounds, arguments.time, tell, arguments.per_script, at_once=arguments.jobs)
    status = _run_to_the_end(run)
    status = _run_to_the_end(functools.partial(_write, arguments.report, made.as_json())) or status
    print(json.dumps(made.as_json(), indent=1) if arguments.json else made.summary())
    if not status and not made.counts["runs"]:
        _on_stderr("integrity-fuzz: no run has come to its step")
        status = TROUBLE
    return ESCAPED if made.escapes else status


def _is_step(text: str) -> bool:
    """Whether the schedule to replay is one of --faults or --kills, as ``save/spawn/pwrite,worker:fsync:1:EIO``."""
    return bool(text) and text[0] not in "@{"


def _run(arguments: argparse.Namespace, scratch: str) -> int:
    from holdfast.integrity import processes

    processes.prepare_program()
    if arguments.jobs < 1:
        raise ValueError("--jobs is at least 1")
    if arguments.resume and (arguments.replay or arguments.faults or arguments.kills or arguments.savers or arguments.power_cuts
                             or arguments.bad_disks or arguments.resets):  # fmt: skip
        raise ValueError("--resume goes on with the rounds of a report: leave it out, or leave out the options of other campaigns")
    if arguments.faults or arguments.kills or _is_step(arguments.replay):
        return _break_steps(arguments, scratch)
    if arguments.savers:
        return _compare(arguments, scratch)
    if arguments.power_cuts or arguments.bad_disks or arguments.resets:
        return _break_disks(arguments)
    made = _campaign(arguments, scratch)
    if arguments.replay:
        run = functools.partial(made.replay, _replayed(arguments.replay), max(1, arguments.repeat))
    else:
        run = functools.partial(made.run, _count(arguments), arguments.time, arguments.shrink, arguments.jobs)
    status = _run_to_the_end(run)
    print(json.dumps(made.as_json(), indent=1) if arguments.json else made.summary())
    return ESCAPED if made.escapes else status
