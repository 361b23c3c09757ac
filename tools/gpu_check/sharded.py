"""Sharded training on one GPU, saved through `holdfast.dcp` and read back: FSDP 1 and 2, DeepSpeed; tests that need a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from report import ROOT, Report, Skip, one_rank, run
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import holdfast.dcp

STRATEGY_TEST = "tests/frameworks/test_lightning_sharded.py::test_fsdp_saves_its_shards"
PEER_TESTS = "peers/nvidia-resiliency-ext"  # as gpu-check.sh --pack puts them beside the sources
TIME_MAX = 60
# In the state of its optimizer.
DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
)


def net(report: Report) -> torch.nn.Module:
    torch.manual_seed(1)
    width = report.size(2048, 32)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))).to("cuda" if report.cuda else "cpu")


def step(model: Any, optimizer: Any) -> None:
    width = next(m for m in model.modules() if isinstance(m, torch.nn.Linear)).in_features
    optimizer.zero_grad()
    model(torch.ones(4, width, device=next(model.parameters()).device)).square().mean().backward()
    optimizer.step()


def values(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        full = state.full_tensor() if hasattr(state, "full_tensor") else state
        return [full.detach().cpu().clone()]
    if isinstance(state, dict):
        return [t for key in sorted(state, key=str) for t in values(state[key])]
    return [t for item in state for t in values(item)] if isinstance(state, (list, tuple)) else []


def saved_and_loaded(report: Report, kind: str) -> list[int]:
    """Tensors that a load brings back as they were at the call, and all of them."""
    one_rank(report.scratch)
    model = net(report)
    if kind == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda" if report.cuda else "cpu", (1,))
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=0, use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    before = [values(part) for part in get_state_dict(model, optimizer)]
    path = str(report.scratch / "sharded")
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    future: Any = holdfast.dcp.async_save(parts, checkpoint_id=path)
    step(model, optimizer)
    future.result()
    fresh: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(fresh, storage_reader=holdfast.dcp.StorageReader(path))
    set_state_dict(model, optimizer, model_state_dict=fresh["model"], optim_state_dict=fresh["optimizer"])
    after = [values(part) for part in get_state_dict(model, optimizer)]
    pairs = [(a, b) for one, other in zip(before, after, strict=True) for a, b in zip(one, other, strict=True)]
    return [sum(torch.equal(a, b) for a, b in pairs), len(pairs)]


def deepspeed(report: Report) -> list[int]:
    one_rank(report.scratch)
    import deepspeed as engines  # type: ignore[import-not-found]

    # DeepSpeed's own Adam is compiled when it is first used, and there may be no compiler.
    settings = {"train_batch_size": 4, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
                "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}  # fmt: skip
    engine, _, _, _ = engines.initialize(model=net(report), config=settings)
    width = engine.module[0].in_features
    loss = engine(torch.ones(4, width, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()

    def parts() -> dict[str, Any]:
        return {"module": engine.module_state_dict(), "optimizer": engine.optimizer.state_dict()}

    before, path = values(parts()), str(report.scratch / "deepspeed")
    save = holdfast.save_async(parts(), path)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(1)
    save.wait()
    after = values(holdfast.load(path, allow=DEEPSPEED_CLASSES))
    return [sum(torch.equal(a, b) for a, b in zip(before, after, strict=True)), len(before)]


def passed(report: Report, *arguments: str) -> tuple[int, int]:
    """How many tests pytest has passed, and how many it was given.

    Raises:
        Skip: there is no pytest.
        RuntimeError: it has run none.
        TimeoutExpired.
    """
    if importlib.util.find_spec("pytest") is None:
        raise Skip("no pytest (gpu-check.sh --pack takes it along)")
    result = report.scratch / "tests.xml"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={result}", "-p", "no:cacheprovider", *arguments]
    status = subprocess.run(command, cwd=report.scratch, env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
                            timeout=TIME_MAX).returncode  # fmt: skip
    counts = xml.etree.ElementTree.parse(result).getroot()[0].attrib if result.exists() else {"tests": "0"}
    given = int(counts["tests"])
    if not given:
        raise RuntimeError(f"pytest has run no test; it ended with {status}")
    return given - sum(int(counts[key]) for key in ("failures", "errors", "skipped")), given


def peer_tests(report: Report) -> None:
    """nvidia-resiliency-ext's own tests of local checkpoints, on one rank, as they are."""
    tests = ROOT / PEER_TESTS
    if not tests.is_dir():
        raise Skip(f"no {PEER_TESTS} (gpu-check.sh --pack takes a checkout's tests along)")
    well, given = passed(report, str(tests))
    report.note("nvidia-resiliency-ext's own tests: passed of all", f"{well} of {given}")


def lightning_strategy(report: Report) -> None:
    """Our test of `holdfast.lightning.FSDPStrategy`: FSDP refuses a CPU."""
    report.need_packages("lightning")
    well, given = passed(report, f"{ROOT / STRATEGY_TEST}")
    report.check("Lightning's FSDPStrategy: tests passed of all", f"{well} of {given}", well == given)


def body(report: Report) -> None:
    for kind in ("FSDP2", "FSDP1"):
        with report.part(kind):
            if kind == "FSDP1":
                report.need_gpu()  # it refuses a CPU
            same, count = report.apart(saved_and_loaded, kind, timeout=TIME_MAX)
            what = f"{kind}: tensors of model and optimizer as at the call, of all"
            report.check(what, f"{same} of {count}", same == count)
    with report.part("DeepSpeed, ZeRO 2"):
        same, count = report.apart(deepspeed, timeout=TIME_MAX)
        report.check("DeepSpeed, ZeRO 2: tensors as at the call, of all", f"{same} of {count}", same == count)
    with report.part("nvidia-resiliency-ext's own tests"):
        report.need_gpu()
        peer_tests(report)
    with report.part("Lightning's FSDPStrategy"):
        report.need_gpu()
        lightning_strategy(report)


if __name__ == "__main__":
    run("sharded", body)
