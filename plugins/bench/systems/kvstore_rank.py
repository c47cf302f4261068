"""A worker or a server of one block: ``-m bytesched.plugins.bench.systems.kvstore_rank BLOCK``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from bytesched.plugins.bench.block import SEED, train
from bytesched.plugins.bench.systems.servers import set_up_store
from bytesched.plugins.bench.workloads.models import build
from bytesched.plugins.mpi_kvstore.opening import open_store

#: of `open_store`; all other options are the system's
STORE_OPTIONS = ("transfer", "updates")


def main(argv: list[str]) -> int:
    """Train, and write what `train` found into the block's folder, a file for each worker."""
    block = json.loads(argv[0])
    if block["threads"]:
        torch.set_num_threads(block["threads"])
    options: dict[str, str] = block["options"]
    # A rank that serves ends in here.
    store = open_store(
        servers=block["servers"],
        transfer=options.get("transfer", "two-sided"),
        updates=options.get("updates", "0") != "0",
        timeout_s=block["timeout_s"],
    )
    workload = build(block["kind"], block["content"], block["batch"], SEED)
    running = set_up_store(
        block["system"],
        {name: text for name, text in options.items() if name not in STORE_OPTIONS},
        workload.model,
        block["optimizer"],
        store,
        servers=block["servers"],
        timeout_s=block["timeout_s"],
    )
    store.barrier()
    found = train(
        workload,
        running,
        warmup=block["warmup"],
        iterations=block["iterations"],
        seed_of=lambda step: step * block["world_size"] + store.rank,
    )
    Path(block["folder"], f"rank{store.rank}.json").write_text(json.dumps(found))
    store.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
