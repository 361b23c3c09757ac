"""Names of files and directories of checkpoints: runtime/layout/FORMAT.md, section 1. Needs no PyTorch.

A pattern is for `fullmatch` with a whole name, without the end `UNFINISHED` of a file being written.
"""

from __future__ import annotations

import hashlib
import os
import re
import string

from holdfast.errors import Error

# The file by which PyTorch's distributed checkpoint (DCP) commits.
METADATA = ".metadata"
# The commit record of a plain checkpoint.
RECORD = "holdfast.commit.json"
# Of a second place: files that no manifest names.
BESIDE_RECORD = "holdfast.beside.json"
MANIFEST_END = ".manifest.json"
REPLICAS = "model-replicas.safetensors"
UNFINISHED = ".tmp"

_ATTEMPT = "(?P<attempt>[0-9a-f]{32})"
_RANK = r"rank-(?P<rank>\d{5,})-of-(?P<world_size>\d{5,})"

MANIFEST = re.compile(rf"{_RANK}\.manifest\.json")
DATA = re.compile(rf"{re.escape(REPLICAS)}|model-\d{{5,}}-of-\d{{5,}}\.safetensors")

# In a framework's directory several attempts stand side by side.
DCP_MANIFEST = re.compile(rf"{_RANK}-{_ATTEMPT}\.manifest\.json")
DCP_RECORD = re.compile(rf"holdfast\.commit-{_ATTEMPT}\.json")
DCP_DATA = re.compile(r"__(?P<rank>\d+)_(?P<generation>\d+)\.distcp")
# A rank may have further data files, whose names begin with the text that distinguishes them.
DCP_ANY_DATA = re.compile(rf".*{DCP_DATA.pattern}")
# Of all ranks, or of one rank that saves alone.
DCP_METADATA = re.compile(r"(__(?P<rank>\d+))?\.metadata")

# A directory that is no checkpoint, or no longer one.
UNCOMMITTED = re.compile(rf"\.?(?P<name>.+)\.(?P<kind>partial|fenced|retired)-{_ATTEMPT}")
_HIDDEN = re.compile(r"\.holdfast-[0-9a-f]{16}")


def manifest(rank: int, world_size: int, attempt: str = "") -> str:
    """A rank's manifest; `attempt`: in a framework's directory."""
    return f"rank-{rank:05d}-of-{world_size:05d}{attempt and f'-{attempt}'}{MANIFEST_END}"


def dcp_record(attempt: str) -> str:
    """The commit record of an attempt in a framework's directory."""
    return f"holdfast.commit-{attempt}.json"


def dcp_data(rank: int, generation: int) -> str:
    """A rank's data file of DCP."""
    return f"{dcp_prefix(rank)}{generation}.distcp"


def dcp_prefix(rank: int) -> str:
    """The begin of the names of a rank's data files of DCP."""
    return f"__{rank}_"


def dcp_metadata(rank: int) -> str:
    """The metadata of a rank that saves alone."""
    return f"__{rank}{METADATA}"


def partial(name: str, attempt: str) -> str:
    """A checkpoint's directory before its commit."""
    return f"{name}.partial-{attempt}"


def aside(partial_name: str) -> str:
    """Where a replaced checkpoint stands until its successor has the name, on a file system that exchanges no names.

    A partial directory of no attempt: a recovery keeps it until a successor stands.
    """
    return partial_name[:-1] + ("1" if partial_name.endswith("0") else "0")


def replaced(name: str, attempt: str) -> tuple[str, str]:
    """The names that the checkpoint may have, until it is retired, which an attempt has replaced: of an exchange, and `aside`."""
    return partial(name, attempt), aside(partial(name, attempt))


def retired(name: str, attempt: str) -> str:
    """A checkpoint's directory during its removal."""
    return f".{name}.retired-{attempt}"


def bytes_of(name: str) -> bytes:
    """A name as bytes, whatever characters the system or a store has put into it."""
    return name.encode("utf-8", "surrogatepass")


def hidden(name: str) -> str:
    """A name for another form of the entry `name`, from which no reader guesses that name."""
    return f".holdfast-{hashlib.sha256(bytes_of(name)).hexdigest()[:16]}"


def unfinished_beside(name: str) -> str:
    """The name of a file beside a checkpoint until it is whole: of a drain, whatever the file is called."""
    return hidden(name) + UNFINISHED


def is_unfinished_beside(name: str) -> bool:
    """Whether a file has a name of `unfinished_beside`."""
    return name.endswith(UNFINISHED) and _HIDDEN.fullmatch(finished(name)) is not None


def finished(name: str) -> str:
    """The name that a file has when it is whole."""
    return name.removesuffix(UNFINISHED)


def kind_of(name: str) -> str:
    """``partial``, ``fenced`` or ``retired``; empty for the name of a checkpoint."""
    match = UNCOMMITTED.fullmatch(name)
    return match["kind"] if match else ""


def retired_name(name: str) -> str:
    """The former name of a retired directory; empty for another directory."""
    match = UNCOMMITTED.fullmatch(name)
    return match["name"] if match and match["kind"] == "retired" else ""


def is_retired_hidden(name: str) -> bool:
    """Whether a retired directory had a hidden name: its owner removes it with all that it holds."""
    former = retired_name(name)
    return bool(former) and _HIDDEN.fullmatch(f".{former}") is not None and name.startswith(".")


def dcp_attempt_of(name: str) -> str:
    """The attempt that a manifest or a commit record in a framework's directory names; else empty."""
    match = DCP_MANIFEST.fullmatch(name) or DCP_RECORD.fullmatch(name)
    return match["attempt"] if match else ""


def is_commit_record(name: str) -> bool:
    """Whether a file is the commit record of a plain checkpoint or of an attempt in a framework's directory."""
    return name == RECORD or DCP_RECORD.fullmatch(name) is not None


def is_record_of_dcp(name: str) -> bool:
    """Whether a file is a proof of a save through DCP, or DCP's own metadata."""
    return name == METADATA or bool(dcp_attempt_of(name))


def is_record(name: str) -> bool:
    """Whether a file says that its directory is a checkpoint."""
    return is_record_of_dcp(name) or name == RECORD or MANIFEST.fullmatch(name) is not None


def is_reserved(name: str) -> bool:
    """Whether a name says what a checkpoint is, or is in use during a save. No data may have it."""
    return is_record(name) or name == BESIDE_RECORD or name.endswith(UNFINISHED) or name.startswith("rank-") and name.endswith(MANIFEST_END)


def format_of(name: str) -> str:
    """``"dcp"`` or ``"holdfast"`` for a file of such a checkpoint; empty for another file."""
    if is_record_of_dcp(name) or DCP_METADATA.fullmatch(name) or DCP_DATA.fullmatch(name):
        return "dcp"
    return "holdfast" if is_record(name) or DATA.fullmatch(name) else ""


_STEPS_TRIED = (0, 7, 999, 1000, 12345678901)


def pattern_of(form: str) -> re.Pattern[str]:
    """Matches the names that a `Checkpointer` makes by a form, as ``step-{step}``.

    Raises:
        Error: INVALID_ARGUMENT for a form of which no step can be read back.
    """
    try:
        parts = list(string.Formatter().parse(form))
        form.format(step=0)
    except (ValueError, LookupError) as error:
        raise Error("INVALID_ARGUMENT", f"Checkpointer: name {form!r}: {error!r}; there is only {{step}}") from None
    fields = [i for i, (_, field, _, _) in enumerate(parts) if field is not None]
    after = "".join(p[0] for p in parts[fields[0] + 1 :]) if fields else ""
    is_path = form in ("", os.curdir, os.pardir) or os.path.basename(form) != form
    if is_path or len(fields) > 1 or re.search(r"\d", after):
        raise Error("INVALID_ARGUMENT", f"Checkpointer: name {form!r}: one name with at most one {{step}} is expected, and no digit after it")
    pattern = re.compile("".join(re.escape(text) + (r"(\d+)" if f is not None else "") for text, f, _, _ in parts))
    for step in _STEPS_TRIED if fields else ():
        found = pattern.fullmatch(form.format(step=step))
        if found is None or int(found[1]) != step:
            raise Error(
                "INVALID_ARGUMENT",
                f"Checkpointer: name {form!r}: step {step} is no decimal number in {form.format(step=step)!r}, so that its checkpoint "
                "would not be found again; write {step}, or {step:08d} for zeros in front",
            )
    return pattern
