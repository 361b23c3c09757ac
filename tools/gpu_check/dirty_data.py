"""Bytes of the next step in a checkpoint, with Megatron's own callers and the real pinned allocator, and with ours.

Each caller's writer is made to come late, as on a busy machine: it begins when the next step has changed the state, and when
released pinned memory has been handed out again and refilled.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from pathlib import Path
from typing import Any

import torch
from report import MIB, Report, one_rank, run, synchronize

import holdfast

TENSORS = 16
ELEMENTS = 4 << 20  # of each, 16 MiB: a power of two, as the pinned allocator rounds
REFILLED = 0xEE


def state(memory: str, cuda: bool, elements: int) -> dict[str, torch.Tensor]:
    """Tensors on the GPU, or on the CPU in memory that a forked child shares: pinned, where there is a GPU."""
    tensors = {f"t{i}": torch.full((elements,), 7.0) for i in range(TENSORS)}
    if memory == "GPU":
        return {name: tensor.cuda() for name, tensor in tensors.items()}
    return {name: t.pin_memory() if cuda else t.share_memory_() for name, t in tensors.items()}


def refill(elements: int) -> None:
    """Takes pinned memory of the sizes that a staging takes, and writes to it."""
    gc.collect()
    taken = [torch.empty(elements, pin_memory=True) for _ in range(2 * TENSORS)]
    for block in taken:
        block.view(torch.uint8).fill_(REFILLED)


def one(report: Report, name: str, memory: str, drops: bool, elements: int) -> list[int]:
    """Elements of a checkpoint that are not those of the call, and all of them."""
    from framework_ways import OUR_CALLER, held_worker, load_megatron, made_late, megatron_callers, prepare_process

    logging.disable(logging.WARNING)
    one_rank(report.scratch)
    prepare_process()
    # The worker that is held is of this memory: a save beyond it gets another one.
    holdfast.configure(arena_bytes=TENSORS * elements * 4 + 64 * MIB)
    caller = megatron_callers()[name]
    worker = held_worker() if name == OUR_CALLER else 0
    caller.begin()
    tensors, flag = state(memory, report.cuda, elements), report.scratch / "go"
    path = str(report.scratch / "checkpoint")

    def change(request: Any) -> Any:
        return request if worker else made_late(request, str(flag))

    wait = caller.save(tensors, path, change)
    if drops:
        for call in caller.queue.async_calls:
            call.async_caller.preloaded_holder = None  # what keeps the staged tensors until the child has ended
    for tensor in tensors.values():
        tensor.add_(1)
    synchronize()
    if report.cuda:
        refill(elements)
    if worker:
        os.kill(worker, signal.SIGCONT)
    Path(flag).touch()
    wait()
    found = load_megatron(tensors, path)
    caller.end()
    return [sum(int((t != 7).sum()) for t in found.values()), elements * TENSORS]


def body(report: Report) -> None:
    elements = report.size(ELEMENTS, 1024)
    import framework_ways

    report.need_packages("megatron.core")
    framework_ways.import_all()
    callers = framework_ways.megatron_callers()
    # What the pinned allocator hands out again, where the staging was released early, and as it is.
    temporal = [name for name in callers if name.endswith("temporal")]
    # Ours first: the others' imports take the most of the time.
    cases = [(memory, False, framework_ways.OUR_CALLER) for memory in ("GPU", "CPU")]
    cases += [("GPU", drops, name) for drops in (True, False) for name in temporal]
    cases += [("CPU", False, name) for name in reversed(callers) if name != framework_ways.OUR_CALLER]
    for memory, drops, name in cases:
        is_ours = name == framework_ways.OUR_CALLER
        where = "GPU tensors" if memory == "GPU" else "pinned CPU parameters" if report.cuda else "shared CPU tensors"
        what = f"{where}, {name}{', its staging buffers released early' if drops else ''}: elements of the next step"
        with report.part(what):
            if memory == "GPU":
                report.need_gpu()
            wrong, count = report.apart(one, name, memory, drops, elements)
            if is_ours:
                report.check(what, f"{wrong} of {count}", wrong == 0, aim="0")
            else:
                report.note(what, f"{wrong} of {count}")


if __name__ == "__main__":
    run("dirty data", body)
