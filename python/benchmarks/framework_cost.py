"""What a save costs the trainer, through Megatron-Core or Lightning: their own ways and Holdfast's, interleaved.

    python framework_cost.py --framework megatron|lightning --dir DIR [options of trainer_cost.py]

The trainer, the windows and the columns are those of `trainer_cost.py`, and one more:

first call   seconds inside the first call of a way, with which its processes start and its memory is taken. "warmed up" is a training
             with --use-persistent-ckpt-worker and HOLDFAST_ARENA_BYTES, whose start has taken the memory

A call is `dist_checkpointing.save` and the scheduling of its request, or the plugin's `save_checkpoint`. Megatron's queues are asked
every 5 ms whether a request has ended. Without a GPU, the stand-in of the tests answers what the callers ask CUDA for. A way whose
bytes are wrong is shown and not compared: a persistent caller gets CPU tensors by reference, and reads them when it comes to it.
"""

from __future__ import annotations

import argparse
import logging
import warnings

import torch
from framework_ways import lightning_ways, megatron_ways, prepare_process
from trainer_cost import COLUMNS, FIRST, WINDOW, Trainer, Way, arguments_of, begin_process, run

OURS = {
    "megatron": ("holdfast.megatron", "holdfast.megatron warmed up", "holdfast.megatron synchronous"),
    "lightning": ("holdfast.lightning",),
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=OURS, required=True)
    arguments = arguments_of(parser)
    begin_process()
    prepare_process()
    trainer = Trainer(arguments.bytes)
    arena_bytes = arguments.bytes + WINDOW
    ways: dict[str, Way]
    if arguments.framework == "megatron":
        ways = megatron_ways(trainer, arena_bytes)
    else:
        ways = lightning_ways(arena_bytes)
    run(arguments, trainer, ways, OURS[arguments.framework], (*COLUMNS, FIRST))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
