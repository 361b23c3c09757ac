"""Makes the pictures in docs/images from real saves: text in SVG, small enough for git.

Run by ``tools/docs.sh --pictures`` in build/venv.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.text import Text

import holdfast
from holdfast.cli import node, watching
from holdfast.observe import picture

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
MIB = 1 << 20
# Two ranks in one process, whose saves take some seconds.
RANKS = f"""
import sys, torch, holdfast
holdfast.configure(arena_bytes=320 * {MIB})
holdfast.save_async({{"w": torch.ones(1000)}}, "run/step-900", step=900).wait()
try:
    holdfast.save_async({{"w": torch.ones(1000)}}, "run/step-900", step=900)
except FileExistsError:
    pass
holdfast.configure(bytes_per_second_max=16 * {MIB})
state = {{"w": torch.ones(32 * {MIB})}}
saves = [holdfast.save_async(state, "run/step-1000", step=1000, rank=r, world_size=2, attempt="5" * 32) for r in (0, 1)]
print("begun", flush=True)
sys.stdin.readline()
for save in saves:
    save.cancel()
    save.durable.exception()
"""


def write_terminal(name: str, console: Console, title: str) -> None:
    """Writes what a recording console has shown, without the fonts that rich loads from elsewhere."""
    text = console.export_svg(title=title, unique_id=name)
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)
    (IMAGES / f"{name}.svg").write_text(re.sub(r"[ \t]+\n", "\n", text))


def recorder(width: int) -> Console:
    return Console(record=True, width=width, file=open(os.devnull, "w"), force_terminal=True, color_system="truecolor")


def make_top() -> None:
    with subprocess.Popen([sys.executable, "-c", RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ranks:
        assert ranks.stdin is not None and ranks.stdout is not None
        assert ranks.stdout.readline() == "begun\n"
        watched = node.Node("run")
        for _ in range(6):
            look = watched.look()
            time.sleep(0.5)
        for process in look.processes:
            for entry in filter(None, (process.last, *process.errors)):
                for key in ("path", "message"):
                    entry[key] = entry.get(key, "").replace(os.getcwd(), "/data")
        console = recorder(126)
        console.print(watching.screen(look, "run", 126, 40))
        ranks.stdin.write("\n")
    write_terminal("top", console, "holdfast top run")


def on_a_terminal(command: list[str]) -> str:
    """What a program writes to a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"})
    written = b""
    with contextlib.suppress(OSError):  # the program has ended
        while part := os.read(terminal, 1 << 16):
            written += part
    os.close(terminal)
    os.waitpid(pid, 0)
    return written.decode()


def make_verify() -> None:
    holdfast.configure(arena_bytes=0, bytes_per_second_max=0)
    holdfast.warm_up(400 * MIB)  # as in a run: the first save alone takes memory from the system
    report = holdfast.save({"model": torch.randn(384 * MIB // 4)}, "run/step-1100", step=1100)
    shown = on_a_terminal([sys.executable, "-m", "holdfast", "verify", "run/step-1100"])
    frames = [frame for frame in re.split(r"[\r\n]+|\x1b\[2?K", shown) if "%" in frame]
    console = recorder(100)
    console.print("$ holdfast verify run/step-1100", style="bold", highlight=False)
    console.print(Text.from_ansi(frames[len(frames) // 2] if frames else ""))
    said = [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)) if line.strip()]
    console.print(Text(said[-1]) if said and "%" not in said[-1] else Text("(no output: sound)", style="dim"))
    console.print()
    console.print(">>> save.durable.result()", style="bold")
    kept = ("path", "step", "bytes", "engine", "direct_io", "time_blocked", "time_to_staged", "time_to_durable",
            "time_writing", "time_syncing")  # fmt: skip
    shown_report = {k: round(report[k], 4) if isinstance(report[k], float) else report[k] for k in kept}
    shown_report["path"] = "run/step-1100"
    console.print(shown_report)
    write_terminal("verify", console, "holdfast verify")


def make_plot_and_trace() -> None:
    state = torch.randn(64 * MIB // 4)
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "holdfast"}
    holdfast.save({"w": state}, "run/plot-0")
    with holdfast.observe.jsonl("lines.jsonl"), holdfast.observe.trace("trace.json"):
        for step in range(1, 41):
            with holdfast.observe.step(step):
                state.mul_(1.0001)
                time.sleep(0.03)
                if step % 8 == 0:
                    holdfast.save_async({"w": state}, f"run/plot-{step}", step=step)
        holdfast.flush()
    picture.plot("lines.jsonl", IMAGES / "plot.svg")
    text = (IMAGES / "plot.svg").read_text()
    (IMAGES / "plot.svg").write_text(re.sub(r"[ \t]+\n", "\n", re.sub(r"<dc:date>.*?</dc:date>", "", text)))
    draw_trace(json.loads(Path("trace.json").read_text()))


def draw_trace(events: list[dict]) -> None:
    """The spans of two saves as rows of time, as Perfetto draws them."""
    saves = sorted((e for e in events if e["ph"] == "X" and e["name"] == "call"), key=lambda e: e["ts"])
    begin, end = saves[1]["ts"] - 60_000, saves[2]["ts"] + 220_000
    names = {(e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    rows = sorted(names)
    width, left, height = 960, 190, 26

    def x(time_us: float) -> float:
        return left + (min(max(time_us, begin), end) - begin) / (end - begin) * (width - left - 10)

    colours = {"call": "#c44e52", "stage": "#dd8452", "seal": "#e8b08a", "write": "#4c72b0", "sync": "#55a868",
               "manifest": "#8172b3", "commit": "#937860"}  # fmt: skip
    total = height * len(rows) * 2 + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" font-family="sans-serif" font-size="12">',
        "<style>.b{fill:#fff}.t{fill:#222}@media(prefers-color-scheme:dark){.b{fill:#161b22}.t{fill:#ddd}}</style>",
        f'<rect class="b" width="{width}" height="{total}"/>',
    ]
    for index, row in enumerate(rows):
        top = 10 + index * height * 2
        out.append(f'<text class="t" x="8" y="{top + 17}">{html.escape(names[row])}</text>')
        for event in sorted((e for e in events if e["ph"] == "X" and e["tid"] == row), key=lambda e: -e["dur"]):
            if event["ts"] + event["dur"] < begin or event["ts"] > end:
                continue
            first, last = x(event["ts"]), x(event["ts"] + event["dur"])
            deeper = event["name"] in ("call", "seal")
            colour = colours.get(event["name"], "#8c8c8c")
            y = top + (height if deeper else 0)
            out.append(f'<rect x="{first:.1f}" y="{y}" width="{max(last - first, 1.5):.1f}" height="{height - 3}" fill="{colour}"/>')
            if last - first > 7 * len(event["name"]) + 6:
                out.append(f'<text fill="#fff" x="{first + 4:.1f}" y="{y + 16}">{html.escape(event["name"])}</text>')
    at = left + 60
    for name, colour in colours.items():
        out.append(f'<rect x="{at}" y="{total - 20}" width="11" height="11" fill="{colour}"/>')
        out.append(f'<text class="t" x="{at + 16}" y="{total - 10}">{name}</text>')
        at += 34 + 7 * len(name)
    out.append(f'<text class="t" x="{left}" y="{total - 10}">0</text>')
    out.append(f'<text class="t" x="{width - 60}" y="{total - 10}">{(end - begin) / 1000:.0f} ms</text></svg>\n')
    (IMAGES / "trace.svg").write_text("\n".join(out))


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        make_top()
        make_verify()
        make_plot_and_trace()
        os.chdir(IMAGES)
    for path in sorted(IMAGES.glob("*.svg")):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
