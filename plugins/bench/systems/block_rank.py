"""One process of a block: a rank of Horovod, or a worker or server of a store over MPI.

``python -m bytesched.plugins.bench.systems.block_rank BLOCK``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from bytesched.errors import PluginError
from bytesched.records import from_json
from bytesched.values import parse_flag

from ..block import SEED, train
from ..rank import leave_after
from ..workloads.models import Workload, build
from .data_parallel import Running, set_up
from .processes import Block


def main(argv: list[str]) -> int:
    """Train, and write what `train` found into the block's folder, a file for each rank."""
    block = from_json(Block, argv[0])
    spec = block.specification
    if spec.threads:
        torch.set_num_threads(spec.threads)
    train_here = _train_on_horovod if spec.servers is None else _train_on_a_store
    train_here(block)
    return 0


def _train_on_horovod(block: Block) -> None:
    import horovod.torch as hvd

    spec = block.specification
    if spec.controller == "mpi" and not hvd.mpi_built():
        raise PluginError("the installed Horovod was built without MPI: use --controller gloo")
    hvd.init()
    if hvd.size() != block.world_size:
        raise PluginError(f"Horovod sees {hvd.size()} ranks, {block.world_size} were started")
    workload = build(spec, SEED)
    running = set_up(block.system.kind, block.system.options, workload.model, spec.optimizer)
    hvd.barrier()
    _train(block, workload, running, hvd.rank(), local_size=hvd.local_size())
    hvd.shutdown()


def _train_on_a_store(block: Block) -> None:
    from ...stores.mpi.opening import open_store
    from .servers import set_up_store

    spec, options = block.specification, dict(block.system.options)
    assert spec.servers is not None, "a block of a store has a store"
    # A rank that serves ends in here.
    store = open_store(
        servers=spec.servers,
        transfer=options.pop("transfer", "two-sided"),
        updates=parse_flag(options.pop("updates", "0")),
        timeout_s=spec.timeout_s,
    )
    workload = build(spec, SEED)
    running = set_up_store(
        block.system.kind,
        options,
        workload.model,
        spec.optimizer,
        store,
        servers=spec.servers,
        timeout_s=spec.timeout_s,
    )
    store.barrier()
    _train(block, workload, running, store.rank)
    store.close()


def _train(block: Block, workload: Workload, running: Running, rank: int, **more: int) -> None:
    found = train(
        workload,
        running,
        warmup=block.warmup,
        iterations=block.iterations,
        seed_of=lambda step: step * block.world_size + rank,
        clip=block.specification.clip,
    )
    # Of a process that has done nothing else.
    del found["peak_bytes"], found["state_bytes"]
    Path(block.folder, f"rank{rank}.json").write_text(json.dumps(found | more))


if __name__ == "__main__":
    if from_json(Block, sys.argv[1]).specification.servers is None:
        leave_after(main)
    # MPI is to be told at the end of the interpreter.
    raise SystemExit(main(sys.argv[1:]))
