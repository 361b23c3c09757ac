"""Megatron's local checkpoints with Holdfast installed: the manager that a training makes, and Megatron's own state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_jobs import State, finalize, run
from no_gpu import cpu_for_gpu

import holdfast
import holdfast.megatron

pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed")


def _local(rank: int, directory: str, algorithm: str, is_replicated: bool) -> None:
    cpu_for_gpu.on_the_cpu()
    holdfast.megatron.install()
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

    # As `pretrain` does.
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

    def manager() -> Any:
        strategy = CliqueReplicationStrategy.from_replication_params(1, 2) if is_replicated else None
        return LocalCheckpointManager(directory, repl_strategy=strategy)

    assert LocalCheckpointManager.__module__.startswith("holdfast.")
    saver = manager()
    for iteration, dialect in enumerate(("mcore", "nvrx"), 1):
        queue = get_async_strategy(dialect, "AsyncCallsQueue")[1]()
        state = State(iteration)
        local, _ = MCoreTensorAwareStateDict.from_state_dict(state.sharded(), algo=algorithm)
        queue.schedule_async_request(saver.save(local, iteration, is_async=True))
        expected = [tensor.clone() for tensor in (state.rows, state.replica, state.step)]
        state.train()
        finalize(queue)
        path = Path(saver.local_ckpt_dir) / f"iter_{iteration:07d}_{rank}_local.pt"
        assert holdfast.verify(path)["verdict"] == "sound"
        loader = manager()
        assert loader.find_latest() == iteration
        found, _ = loader.load()
        loaded = found.to_state_dict(State(0).sharded(), algo=algorithm)
        for name, tensor in zip(("rows", "replica", "step"), expected, strict=True):
            assert bool((loaded[name] == tensor).all()), (dialect, name)
        assert loaded["note"] == {"iteration": 7}
    holdfast.megatron.uninstall()


@pytest.mark.parametrize("is_replicated", [False, True], ids=["alone", "replicated"])
@pytest.mark.parametrize("algorithm", ["atomic", "fully_parallel"])
def test_a_training_saves_local_checkpoints(tmp_path: Path, algorithm: str, is_replicated: bool) -> None:
    run(2, tmp_path, _local, str(tmp_path / "local"), algorithm, is_replicated)
