"""GPU memory that a load leaves behind: the model on the GPU, the optimizer's state moved to the CPU."""

from __future__ import annotations

import gc
from typing import Any

import torch
from report import GIB, MIB, Report, memory_on_gpu, run, synchronize

import holdfast

LAYERS = 16
LEFT_MAX = 2 * MIB


class Net(torch.nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def trained(width: int, device: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = Net(width).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(4, width, device=device)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer


def to_cpu(optimizer: torch.optim.Optimizer) -> None:
    for entry in optimizer.state.values():
        entry.update({key: value.cpu() for key, value in entry.items()})
    gc.collect()


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [entry[key].cpu().clone() for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def settled() -> int:
    gc.collect()
    synchronize()
    return memory_on_gpu()


def ours(net: Net, optimizer: torch.optim.Optimizer, path: str) -> None:
    holdfast.load(path, into={"net": net, "optimizer": optimizer})


def torchs(net: Net, optimizer: torch.optim.Optimizer, path: str) -> None:
    """As scripts do: everything to the device of the model, then the optimizer's state to the CPU."""
    found = torch.load(path, map_location=next(net.parameters()).device, weights_only=True)
    net.load_state_dict(found["net"])
    optimizer.load_state_dict(found["optimizer"])
    to_cpu(optimizer)


def body(report: Report) -> None:
    width = report.size(4096, 64)
    device = "cuda" if report.cuda else "cpu"
    net, optimizer = trained(width, device)
    weights, saved = [p.detach().cpu().clone() for p in net.parameters()], moments(optimizer)
    ways: dict[str, tuple[Any, str]] = {
        "holdfast.load": (ours, str(report.scratch / "ours")),
        "torch.load": (torchs, str(report.scratch / "stock.pt")),
    }
    holdfast.save_async({"net": net, "optimizer": optimizer}, ways["holdfast.load"][1]).wait()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, ways["torch.load"][1])
    report.row("state", sum(t.nbytes for t in (*weights, *saved)) / GIB, "GiB")
    for name, (load, path) in ways.items():
        with report.part(name):
            to_cpu(optimizer)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.zero_()
            before = settled()
            if report.cuda:
                torch.cuda.reset_peak_memory_stats()
            load(net, optimizer, path)
            peak = torch.cuda.max_memory_allocated() if report.cuda else 0
            left = settled() - before
            is_ours = name == "holdfast.load"
            report.row(f"{name}: GPU memory left behind", left / MIB, "MiB", aim="at most 2" if is_ours else "",
                       ok=left <= LEFT_MAX if is_ours else None)  # fmt: skip
            report.row(f"{name}: above that before at its peak", (peak - before) / MIB, "MiB")
            right = all(torch.equal(a.cpu(), b) for a, b in zip(net.parameters(), weights, strict=True))
            right = right and all(torch.equal(a, b) for a, b in zip(moments(optimizer), saved, strict=True))
            report.check(f"{name}: all values are those saved", right, right, aim="true")
            where = {t.device.type for e in optimizer.state.values() for t in e.values()}
            report.check(f"{name}: the optimizer's state is on", ", ".join(where), where == {"cpu"}, aim="cpu")


if __name__ == "__main__":
    run("load", body)
