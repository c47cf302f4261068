"""One rank of a block of Horovod: ``python -m bytesched.plugins.bench.systems.rank BLOCK``."""

from __future__ import annotations

import json
from pathlib import Path

import horovod.torch as hvd
import torch

from bytesched.errors import PluginError
from bytesched.records import from_json

from ..block import SEED, train
from ..leaving import leave_after
from ..workloads.models import build
from .data_parallel import set_up
from .processes import Block


def main(argv: list[str]) -> int:
    """Train, and write what `train` found into the block's folder, a file for each rank."""
    block = from_json(Block, argv[0])
    spec = block.specification
    if spec.threads:
        torch.set_num_threads(spec.threads)
    if spec.controller == "mpi" and not hvd.mpi_built():
        raise PluginError("the installed Horovod was built without MPI: use --controller gloo")
    hvd.init()
    rank, world_size = hvd.rank(), hvd.size()
    if world_size != block.world_size:
        raise PluginError(f"Horovod sees {world_size} ranks, {block.world_size} were started")
    workload = build(spec.kind, block.content, spec.batch, SEED)
    running = set_up(block.system.kind, block.system.options, workload.model, spec.optimizer)
    hvd.barrier()
    found = train(
        workload,
        running,
        warmup=block.warmup,
        iterations=block.iterations,
        seed_of=lambda step: step * world_size + rank,
        clip=spec.clip,
    )
    found["local_size"] = hvd.local_size()
    Path(block.folder, f"rank{rank}.json").write_text(json.dumps(found))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    leave_after(main)
