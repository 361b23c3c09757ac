"""A picture of one run's saves, from the file that `jsonl` wrote."""

from __future__ import annotations

import os
from typing import Any

from holdfast.errors import Error, of_system
from holdfast.observe.json_lines import read_jsonl

# Parts of a save on top of each other, and their colours.
_PARTS = (
    ("the call blocks the trainer", "#c44e52"),
    ("until staged", "#dd8452"),
    ("until durable", "#4c72b0"),
)


def plot(lines: str | os.PathLike[str], picture: str | os.PathLike[str]) -> None:
    """Draws when and how long each save blocked, staged and became durable, and how fast.

    Args:
        lines: a file that `jsonl` wrote.
        picture: the file to make; its ending decides what it is (``.png``, ``.svg``, ...).

    Raises:
        Error: UNIMPLEMENTED without matplotlib, NOT_FOUND if the file has no saves, INVALID_ARGUMENT for a file that
            `jsonl` did not write, or an ending that is no kind of picture; of the system.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Error(
            "UNIMPLEMENTED", "observe.plot: matplotlib is not installed; pip install matplotlib"
        ) from error
    name = os.fspath(picture)
    kind, kinds = os.path.splitext(name)[1][1:].lower() or "png", FigureCanvasBase.get_supported_filetypes()
    if kind not in kinds:
        raise Error("INVALID_ARGUMENT", f"observe.plot {name}: its ending is none of {', '.join(sorted(kinds))}")
    records = list(read_jsonl(lines))
    saved = [r for r in records if r["outcome"] == "durable"]
    if not records:
        raise Error("NOT_FOUND", f"observe.plot {os.fspath(lines)}: it has no saves")
    figure = Figure(figsize=(10, 6), layout="constrained")
    times, rates = figure.subplots(2, 1, sharex=True)
    start = min(r["time"] - r.get("time_to_durable", 0) for r in records)
    _bars(times, saved, start)
    rates.plot(
        [r["time"] - start for r in saved],
        [r["bytes"] / max(r["time_to_durable"], 1e-9) / 2**30 for r in saved],
        "o",
        color="#4c72b0",
    )
    for r in records:
        if r["outcome"] != "durable":
            times.axvline(r["time"] - start, color="#c44e52", linestyle=":")
            times.annotate(
                f"{r['outcome']}: {r['error']['code']}",
                (r["time"] - start, 1),
                xycoords=("data", "axes fraction"),
                rotation=90,
                va="top",
                ha="right",
                fontsize=7,
            )
    times.set_ylabel("seconds since the call")
    times.set_title(f"{len(saved)} of {len(records)} saves durable", loc="left")
    rates.set_ylabel("GiB/s until durable")
    rates.set_ylim(bottom=0)
    rates.set_xlabel("seconds of the run")
    with of_system(f"observe.plot {name}"):
        figure.savefig(name, dpi=120)


def _ends(report: dict[str, Any]) -> tuple[float, float, float]:
    """When the parts of a save end, in seconds after the call."""
    entered = (report["entered_ns"] - report["called_ns"]) / 1e9 if "called_ns" in report else 0.0
    blocked = report.get("time_blocked", report["time_in_call"])
    staged = max(blocked, entered + report["time_to_staged"])
    return blocked, staged, max(staged, entered + report["time_to_durable"])


def _bars(axes: Any, saved: list[dict[str, Any]], start: float) -> None:
    at = [r["time"] - start for r in saved]
    width = max(min((b - a for a, b in zip(at, at[1:], strict=False)), default=1.0) * 0.6, 0.01)
    bottom = [0.0] * len(saved)
    for part, (label, colour) in enumerate(_PARTS):
        ends = [_ends(r)[part] for r in saved]
        height = [end - low for end, low in zip(ends, bottom, strict=True)]
        axes.bar(at, height, width, bottom=bottom, label=label, color=colour)
        bottom = ends
    if saved:
        # Above the bars, which may fill the axes.
        axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_PARTS), frameon=False)
