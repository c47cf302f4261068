"""One rank that times all-reduces for `bytesched sim --measure`: ``python -m ... PROBES PLACE``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bytesched.lab.ranks import Place
from bytesched.records import from_json, to_json
from bytesched.sim.measure import Measured, Probes

from .leaving import leave_after
from .link import all_reduces_s


def main(argv: list[str]) -> int:
    """Time them; rank 0 writes what all agree on."""
    probes, place = from_json(Probes, argv[0]), from_json(Place, argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=probes.timeout_s))
    least_s = torch.tensor([min(all_reduces_s(size, probes.tries)) for size in probes.sizes_bytes])
    dist.all_reduce(least_s, op=dist.ReduceOp.MAX)
    measured = Measured(
        ranks=dist.get_world_size(),
        sizes_bytes=probes.sizes_bytes,
        seconds=tuple(least_s.tolist()),
    )
    if place.rank == 0:
        Path(place.result).write_text(to_json(measured))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave_after(main)
