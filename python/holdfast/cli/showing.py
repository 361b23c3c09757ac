"""``holdfast show``: the tensors, objects and plain values of a checkpoint or a file."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli import sources, text
from holdfast.errors import counted

_DESCRIPTION = """\
Lists the tensors and objects of a checkpoint (plain or DCP), a safetensors file or a torch.save zip.
Reads no tensor data, and makes no object. DCP checkpoints and torch.save zips need PyTorch.
"""
_EPILOG = """\
examples:
  holdfast show run/step-100
  holdfast show --values run/step-100          # with learning rates, steps and other plain values
  holdfast show --json run/step-100 | jq '.tensors[] | select(.dtype == "F32") | .name'

exit status: 0 shown, 2 trouble
"""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a safetensors or torch.save file")
    parser.add_argument("--values", action="store_true", help="print the plain values, too")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    source = sources.open_source(arguments.path)
    tensors = [t._replace(name=part.label + t.name) for part in source.parts() for t in part.tensors.values()]
    objects = source.objects()
    values = source.values() if arguments.values else {}
    if arguments.json:
        text.document(
            "show", path=source.path, format=source.format, **source.facts,
            tensors=[{"name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.nbytes, "file": t.file, "ranks": t.ranks, "tied_to": t.tied_to} for t in tensors],
            objects=[{"name": name, "class": o.cls, "bytes": o.nbytes} for name, o in objects.items()],
            values=values,
        )  # fmt: skip
        return 0
    rows: list[tuple[Any, ...]] = [(t.name, t.dtype, list(t.shape), t.nbytes, t.file, t.ranks) for t in tensors]
    rows += [(name, "object", o.cls, o.nbytes, "", 1) for name, o in objects.items()]
    columns = 6 if any(t.ranks > 1 for t in tensors) else 5
    head = ("NAME", "DTYPE", "SHAPE", "BYTES", "FILE", "RANKS")[:columns]
    text.table(head, [row[:columns] for row in rows], right="BYTES RANKS")
    text.lines(f"{name} = {value}" for name, value in values.items())
    facts = [f"{counted(len(tensors), 'tensor')}, {text.size(sum(t.nbytes for t in tensors if t.tied_to is None))}",
             counted(len(objects), "object")]
    if "step" in source.facts:
        facts.append(f"step {source.facts['step']}, saved {text.age(source.facts['saved_at'])} ago")
    if source.facts.get("world_size"):
        facts.append(counted(source.facts["world_size"], "rank"))
    print(f"{source.format}: " + "; ".join(facts))
    return 0
