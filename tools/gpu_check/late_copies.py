"""Copies behind the training on a real GPU: their bytes, order, memory, the time that they block, and their rate."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

import torch
from report import GIB, MIB, Report, device_of, memory_on_gpu, run, synchronize, timed

import holdfast

TENSORS = 48
ROUNDS = 8


class Training:
    """Parameters with Adam, which change as a whole with every step."""

    def __init__(self, nbytes: int, device: str) -> None:
        elements = nbytes // 3 // 4 // TENSORS
        self.parameters = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(TENSORS)]
        self.optimizer = torch.optim.Adam(self.parameters)
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        synchronize()

    def state(self) -> dict[str, Any]:
        return {"model": dict(enumerate(p.detach() for p in self.parameters)), "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """In the order of `tensors_in`."""
        own = [self.optimizer.state[p] for p in self.parameters]
        return [*(p.detach() for p in self.parameters), *(s["exp_avg"] for s in own), *(s["exp_avg_sq"] for s in own)]

    def copies(self) -> list[torch.Tensor]:
        return [tensor.detach().cpu().clone() for tensor in self.tensors()]


def tensors_in(path: str) -> list[torch.Tensor]:
    found = holdfast.load(path)
    entries = found["optimizer"]["state"]
    return [
        *(found["model"][i] for i in range(TENSORS)),
        *(entries[i][key] for key in ("exp_avg", "exp_avg_sq") for i in range(TENSORS)),
    ]


def wrong_elements(path: str, saved: list[torch.Tensor]) -> int:
    return sum(int((a.cpu() != b).sum()) for a, b in zip(tensors_in(path), saved, strict=True))


def saves_late(report: Report, training: Training) -> None:
    """The next step is queued right behind the call, and waits for the copies by itself."""
    path, saved = str(report.scratch / "late"), training.copies()
    begin = time.thread_time()
    blocked, save = timed(lambda: holdfast.save_async(training.state(), path, late=[training.optimizer]))
    cpu = time.thread_time() - begin
    step, _ = timed(training.optimizer.step)
    save.wait()
    gib = sum(t.nbytes for t in saved) / GIB
    wrong = wrong_elements(path, saved)
    report.check("elements of the next step, queued right behind the call", wrong, wrong == 0, aim="0")
    report.row("blocked in the call", blocked / gib, "s/GiB")
    report.row("CPU time of the call", cpu / gib, "s/GiB")
    synchronize()
    plain, _ = timed(training.optimizer.step)
    report.row("CPU time of optimizer.step behind a save", step - plain, "s more than without")


def takes_no_memory(report: Report, training: Training) -> None:
    synchronize()
    if report.cuda:
        torch.cuda.reset_peak_memory_stats()
    before = memory_on_gpu()
    save = holdfast.save_async(training.state(), str(report.scratch / "memory"), late=[training.optimizer])
    save.wait()
    peak = torch.cuda.max_memory_allocated() if report.cuda else 0
    report.row("GPU memory above that before, at its peak", peak - before, "bytes", aim="0", ok=peak == before)


def waits_for_the_stream(report: Report, training: Training) -> None:
    """What the stream writes at last is queued when the call comes, behind a kernel that takes its time."""
    report.need_gpu()
    path = str(report.scratch / "stream")
    with torch.no_grad():
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        for tensor in training.tensors():
            tensor.fill_(7)
    blocked, save = timed(lambda: holdfast.save_async(training.state(), path, late=[training.optimizer]))
    still_asleep = not torch.cuda.current_stream().query()
    with torch.no_grad():
        save.wait_staged_on()
        for tensor in training.tensors():
            tensor.fill_(8)
    save.wait()
    wrong = sum(int((t != 7).sum()) for t in tensors_in(path))
    report.check("order: elements that are not those of the stream at the call", wrong, wrong == 0, aim="0")
    report.check("order: the call returned before the stream had come to it", still_asleep, still_asleep, aim="true")
    report.row("order: blocked in the call, behind half a second of kernels", blocked, "s")


def rates(report: Report, training: Training) -> None:
    """Device to host: from the first queued copy to the end of the last, beside one into plain pinned memory."""
    report.need_gpu()
    tensors = training.tensors()
    nbytes = sum(t.nbytes for t in tensors)
    pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    plain: list[float] = []
    ours: list[float] = []
    for round_ in range(ROUNDS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        synchronize()
        begin.record()
        for host, tensor in zip(pinned, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        end.record()
        synchronize()
        if round_:
            plain.append(nbytes / begin.elapsed_time(end) * 1000)
        begin.record()
        save = holdfast.save_async(training.state(), str(report.scratch / "rate"), late=[training.optimizer], replace=True)
        save.wait_staged_on()
        end.record()
        synchronize()
        with contextlib.suppress(holdfast.Error):  # only the copies are measured
            save.cancel()
            save.wait()
        if round_:
            ours.append(nbytes / begin.elapsed_time(end) * 1000)
    mine, other = statistics.median(ours), statistics.median(plain)
    report.row("device to host: into plain pinned memory", other / 1e9, "GB/s")
    report.row("device to host: of a save, with its planning", mine / 1e9, "GB/s")
    report.row("device to host: of a save, as a part of plain pinned", mine / other, "", aim="at least 0.95",
               ok=mine >= 0.95 * other)  # fmt: skip


def captures_at_the_call(report: Report, training: Training) -> None:
    """Without `late` the stream waits, and what changes the tensors next comes after the copies."""
    path, saved = str(report.scratch / "early"), training.copies()
    blocked, save = timed(lambda: holdfast.save_async(training.state(), path))
    with torch.no_grad():
        for tensor in training.tensors():
            tensor.add_(1)
    save.wait()
    wrong = wrong_elements(path, saved)
    report.check("without late=: elements changed right behind the call", wrong, wrong == 0, aim="0")
    report.row("without late=: blocked in the call", blocked, "s")


def body(report: Report) -> None:
    nbytes = report.size(4 * GIB, 8 * MIB)
    with device_of(report) as device:
        holdfast.configure(arena_bytes=nbytes + 64 * MIB)
        holdfast.warm_up(nbytes)
        training = Training(nbytes, device)
        # The registration of the staging memory with the GPU comes with the first save.
        holdfast.save_async(training.state(), report.scratch / "first", late=[training.optimizer]).wait()
        for part in (saves_late, takes_no_memory, waits_for_the_stream, captures_at_the_call, rates):
            with report.part(part.__name__.replace("_", " ")):
                part(report, training)


if __name__ == "__main__":
    run("late copies", body)
