"""Trains Megatron-Core's GPT with tensor parallelism, saved by ``megatron.training`` through Holdfast.

    torchrun --nproc-per-node 2 train_megatron.py --dir run [--steps 40] [--every 10] [--size tiny]

Started again, also with another number of ranks, it goes on where it was. The arguments, the saves, the
loads and the tracker file ``latest_checkpointed_iteration.txt`` are Megatron's own. It trains on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import gpt
import megatron_cpu
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.async_utils import maybe_finalize_async_save
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.training import preprocess_common_state_dict

import holdfast.megatron


def parse_for_megatron(options: argparse.Namespace, size: gpt.Size) -> argparse.Namespace:
    """The arguments of Megatron, as its parser makes them of a command line."""
    values = {
        "num-layers": size.layers,
        "hidden-size": size.width,
        "num-attention-heads": size.heads,
        "seq-length": size.context,
        "max-position-embeddings": size.context,
        "micro-batch-size": size.batch,
        "tensor-model-parallel-size": os.environ["WORLD_SIZE"],
        "attention-dropout": 0,  # its random state is that of a GPU
        "vocab-size": gpt.VOCABULARY,
        "tokenizer-type": "NullTokenizer",
        "train-iters": options.steps,
        "lr": 1e-3,
        "save": options.dir,
        "load": options.dir,
        "save-interval": options.every,
    }
    switches = ["async-save", "use-persistent-ckpt-worker", "use-cpu-initialization", "disable-jit-fuser",
                "no-persist-layer-norm", "no-gradient-accumulation-fusion", "no-masked-softmax-fusion"]  # fmt: skip
    sys.argv[1:] = [f"--{name}={value}" for name, value in values.items()]
    sys.argv += [f"--{switch}" for switch in switches]
    return parse_and_validate_args()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument("--size", choices=gpt.SIZES, default="tiny")
    options = parser.parse_args()
    size = gpt.SIZES[options.size]

    holdfast.megatron.install()
    megatron_cpu.use_cpu()
    arguments = parse_for_megatron(options, size)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(arguments.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(arguments.seed)

    config = core_transformer_config_from_args(arguments)
    model = GPTModel(config, get_gpt_layer_local_spec(), gpt.VOCABULARY, size.context)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    # Megatron clips no gradients in CPU memory.
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=arguments.lr, clip_grad=0), [model])
    loader = gpt.Loader(size)  # the ranks hold parts of one model, so they see the same batches
    positions = torch.arange(size.context).expand(size.batch, -1)
    hidden = torch.ones(1, 1, size.context, size.context, dtype=torch.bool).triu(1)

    first, _ = load_checkpoint([model], optimizer, None)
    loader.step = first
    for step in range(first + 1, options.steps + 1):
        inputs, targets = loader.batch()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(inputs, positions, hidden, labels=targets).mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item()}", flush=True)
        maybe_finalize_async_save()  # once a checkpoint is durable, the tracker file names it
        if step % options.every == 0:
            save_checkpoint(step, [model], optimizer, None, num_floating_point_operations_so_far=0,
                            preprocess_common_state_dict_fn=preprocess_common_state_dict)  # fmt: skip
    maybe_finalize_async_save(blocking=True, terminate=True)
    if dist.get_rank() == 0:
        print(f"done: {sorted(path.name for path in Path(options.dir).iterdir())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
