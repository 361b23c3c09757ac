"""Megatron's callers and ours on a GPU: the time in the call, GPU memory that a worker holds, and whether the bytes are right."""

from __future__ import annotations

import functools
import logging
import statistics
import threading
from typing import Any

import torch
from report import GIB, MIB, Report, one_rank, run, synchronize, timed

import holdfast

SAVES = 3
TENSORS = 16


class Others:
    """GPU memory that other processes hold beyond what they held when this was made: now, and at its peak."""

    def __init__(self) -> None:
        self._before = 0
        self._before = self.held()
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def held(self) -> int:
        if not torch.cuda.is_available():
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved() - self._before

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self.held())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def one(report: Report, name: str, nbytes: int) -> dict[str, Any]:
    from framework_ways import load_megatron, megatron_callers, prepare_process

    logging.disable(logging.WARNING)
    one_rank(report.scratch)
    prepare_process()
    device = "cuda" if report.cuda else "cpu"
    tensors = {f"t{i}": torch.zeros(nbytes // TENSORS // 4, device=device) for i in range(TENSORS)}
    holdfast.configure(arena_bytes=nbytes + 64 * MIB)
    caller = megatron_callers()[name]
    synchronize()
    others = Others()
    caller.begin()
    calls, wrong = [], 0
    for number in range(SAVES + 1):
        for tensor in tensors.values():
            tensor.fill_(number)
        path = str(report.scratch / f"checkpoint-{number}")
        synchronize()
        seconds, wait = timed(functools.partial(caller.save, tensors, path))
        calls.append(seconds)
        for tensor in tensors.values():
            tensor.add_(0.5)
        wait()
        found = load_megatron(tensors, path)
        wrong += sum(int((t != number).sum()) for t in found.values())
        del found
    if report.cuda:
        torch.cuda.empty_cache()
    held = others.held()
    others.stop()
    caller.end()
    return {"first": calls[0], "blocked": statistics.median(calls[1:]), "held": held, "peak": others.peak, "wrong": wrong}


def body(report: Report) -> None:
    import framework_ways

    report.need_packages("megatron.core")
    framework_ways.import_all()
    nbytes = report.size(2 * GIB, MIB)
    # The most telling ones first.
    names = sorted(framework_ways.megatron_callers(), key=lambda n: (n != framework_ways.OUR_CALLER, "persistent" not in n))
    for name in names:
        with report.part(name):
            is_ours = name == framework_ways.OUR_CALLER
            found = report.apart(one, name, nbytes)
            gib = nbytes / GIB
            report.row(f"{name}: blocked", found["blocked"] / gib, "s/GiB", aim="at most 0.2" if is_ours else "",
                       ok=found["blocked"] / gib <= 0.2 if is_ours else None)  # fmt: skip
            report.row(f"{name}: first call", found["first"], "s", aim="at most 0.5" if is_ours else "",
                       ok=found["first"] <= 0.5 if is_ours else None)  # fmt: skip
            # A GPU maps pinned memory by pages of 4 KiB, with 8 bytes for each.
            tables = nbytes // 512 + MIB
            report.row(f"{name}: GPU memory that its worker holds after the saves", found["held"] / MIB, "MiB",
                       aim=f"at most {tables // MIB}: no context, and the GPU's table of our pinned pages" if is_ours else "",
                       ok=found["held"] <= tables if is_ours else None)  # fmt: skip
            report.row(f"{name}: the same at its peak", found["peak"] / MIB, "MiB")
            what = f"{name}: elements that are not those of the call, in {SAVES + 1} saves"
            if is_ours:
                report.check(what, found["wrong"], found["wrong"] == 0, aim="0")
            else:
                report.note(what, found["wrong"])


if __name__ == "__main__":
    run("callers", body)
