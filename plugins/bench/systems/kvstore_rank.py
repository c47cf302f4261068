"""A worker or a server of one block: ``-m bytesched.plugins.bench.systems.kvstore_rank BLOCK``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from bytesched.records import from_json

from ...stores.mpi.opening import open_store
from ..block import SEED, train
from ..workloads.models import build
from .processes import Block
from .servers import set_up_store

#: of `open_store`; all other options are the system's
STORE_OPTIONS = ("transfer", "updates")


def main(argv: list[str]) -> int:
    """Train, and write what `train` found into the block's folder, a file for each worker."""
    block = from_json(Block, argv[0])
    spec = block.specification
    if spec.threads:
        torch.set_num_threads(spec.threads)
    options = block.system.options
    assert spec.servers is not None, "a block of a store has a store"
    # A rank that serves ends in here.
    store = open_store(
        servers=spec.servers,
        transfer=options.get("transfer", "two-sided"),
        updates=options.get("updates", "0") != "0",
        timeout_s=spec.timeout_s,
    )
    workload = build(spec.kind, block.content, spec.batch, SEED)
    running = set_up_store(
        block.system.kind,
        {name: text for name, text in options.items() if name not in STORE_OPTIONS},
        workload.model,
        spec.optimizer,
        store,
        servers=spec.servers,
        timeout_s=spec.timeout_s,
    )
    store.barrier()
    found = train(
        workload,
        running,
        warmup=block.warmup,
        iterations=block.iterations,
        seed_of=lambda step: step * block.world_size + store.rank,
    )
    Path(block.folder, f"rank{store.rank}.json").write_text(json.dumps(found))
    store.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
