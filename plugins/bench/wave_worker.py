"""One rank of `bytesched wave`: ``python -m bytesched.plugins.bench.wave_worker SPECIFICATION``."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bytesched.bench.specification import WaveSpecification
from bytesched.lab.ranks import Place
from bytesched.records import from_json

from .leaving import leave_after
from .systems import partitions as bench_model
from .systems import waves as bench_ticktock

__all__ = ["main"]

_MEASURES: dict[str, Callable[[WaveSpecification, str], dict[str, Any]]] = {
    "ticktock": bench_ticktock.measure,
    "model": bench_model.measure,
}


def main(argv: list[str]) -> int:
    """Measures every system in turn; rank 0 writes what was found."""
    spec, place = from_json(WaveSpecification, argv[0]), from_json(Place, argv[1])
    torch.set_num_threads(spec.threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=spec.timeout_s))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    measure = _MEASURES[spec.kind]
    found: dict[str, list[Any]] = {system: [] for system in spec.systems}
    for turn in range(spec.rounds):
        for system in spec.systems:
            dist.barrier()
            result = measure(spec, system)
            every: list[Any] = [None] * ranks
            dist.all_gather_object(every, result)
            found[system].append(every)
            gc.collect()
            if rank == 0:
                median_ms = statistics.median(result["iteration_ms"])
                print(
                    f"round {turn + 1}/{spec.rounds}  {system:<20} {median_ms:8.1f} ms",
                    flush=True,
                )
    if rank == 0:
        Path(place.result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave_after(main)
