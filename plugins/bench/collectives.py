"""One rank that measures for `bytesched sim --measure`: ``python -m ... PROBES PLACE``."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bytesched.lab.ranks import Place
from bytesched.link.algorithms import ALGORITHMS
from bytesched.records import from_json, to_json
from bytesched.sim.measure import Measured, Probes
from bytesched.sim.systems import CpuCosts

from .costs import copy_bytes_per_s, cpu_costs, update_bytes_per_s
from .leaving import leave_after
from .link import all_reduces_s

#: of the smallest probe of a warm-up, whose CPU time chunk sizes depend on
_COLLECTIVE_BYTES = 128 << 10
#: of gradients that are updated and copied: more than caches hold
_BULK_BYTES = 64 << 20
#: what ranks that share cores have in common, whatever their hosts are called
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def main(argv: list[str]) -> int:
    """Measure; rank 0 writes what all agree on."""
    probes, place = from_json(Probes, argv[0]), from_json(Place, argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=probes.timeout_s))
    measured = _measured(probes)
    if place.rank == 0:
        Path(place.result).write_text(to_json(measured))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _measured(probes: Probes) -> Measured:
    ranks = dist.get_world_size()
    least_s = torch.tensor([min(all_reduces_s(size, probes.tries)) for size in probes.sizes_bytes])
    dist.all_reduce(least_s, op=dist.ReduceOp.MAX)
    seconds: list[float] = least_s.tolist()
    nbytes = min(probes.cost_bytes, int(probes.sizes_bytes[-1] / seconds[-1] * probes.cost_s))
    messages = ALGORITHMS["ring"].messages(ranks)
    plain, scheduled = (
        _mean_costs(cpu_costs(kind, nbytes, messages)) for kind in ("ddp", "bytesched")
    )
    update, copied, cpu_s = _mean(
        [
            update_bytes_per_s(_BULK_BYTES),
            copy_bytes_per_s(_BULK_BYTES),
            _collective_cpu_s(probes.tries),
        ]
    )
    return Measured(
        ranks=ranks,
        sizes_bytes=probes.sizes_bytes,
        seconds=tuple(seconds),
        cores_per_rank=_cores_per_rank(),
        update_bytes_per_s=update,
        copy_bytes_per_s=copied,
        collective_cpu_s=cpu_s,
        plain=plain,
        scheduled=scheduled,
    )


def _collective_cpu_s(tries: int) -> float:
    began_s = time.process_time()
    all_reduces_s(_COLLECTIVE_BYTES, tries)
    return (time.process_time() - began_s) / (2 * tries + 1)


def _cores_per_rank() -> float:
    """Of the ranks on this machine, each of which may be bound to cores of its own."""
    here = _BOOT.read_text() if _BOOT.exists() else socket.gethostname()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (here, os.sched_getaffinity(0)))
    of_ranks = [cores for machine, cores in found if machine == here]
    return len(frozenset().union(*of_ranks)) / len(of_ranks)


def _mean_costs(costs: CpuCosts) -> CpuCosts:
    found = asdict(costs)
    return CpuCosts(**dict(zip(found, _mean(list(found.values())), strict=True)))


def _mean(values: list[float]) -> list[float]:
    """Of all ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found)
    return [float(value) / dist.get_world_size() for value in found]


if __name__ == "__main__":
    leave_after(main)
