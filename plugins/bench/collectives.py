"""One rank that measures for `bytesched sim --measure`: ``python -m ... PROBES PLACE``."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bytesched.lab.ranks import Place
from bytesched.link.algorithms import ALGORITHMS
from bytesched.sim.measure import Measured, Probes
from bytesched.sim.systems import CpuCosts

from .costs import copy_bytes_per_s, cpu_costs, update_bytes_per_s
from .link import all_reduces_s
from .rank import Ranks, run_rank

#: of the smallest probe of a warm-up, whose CPU time chunk sizes depend on
_COLLECTIVE_BYTES = 128 << 10
#: of gradients that are updated and copied: more than caches hold
_BULK_BYTES = 64 << 20
#: what ranks that share cores have in common, whatever their hosts are called
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def _measure(probes: Probes, _: Place) -> dict[str, Any]:
    ranks = Ranks()
    least_s = zip(
        *ranks.gather([min(all_reduces_s(size, probes.tries)) for size in probes.sizes_bytes]),
        strict=True,
    )
    seconds = tuple(map(max, least_s))
    nbytes = min(probes.cost_bytes, int(probes.sizes_bytes[-1] / seconds[-1] * probes.cost_s))
    messages = ALGORITHMS["ring"].messages(ranks.size)
    costs = (asdict(cpu_costs(kind, nbytes, messages)) for kind in ("ddp", "bytesched"))
    plain, scheduled = (
        CpuCosts(**dict(zip(cost, ranks.means(list(cost.values())), strict=True))) for cost in costs
    )
    speeds = update_bytes_per_s(_BULK_BYTES), copy_bytes_per_s(_BULK_BYTES)
    update, copied, cpu_s = ranks.means([*speeds, _collective_cpu_s(probes.tries)])
    measured = Measured(
        ranks=ranks.size,
        sizes_bytes=probes.sizes_bytes,
        seconds=seconds,
        cores_per_rank=_cores_per_rank(ranks),
        update_bytes_per_s=update,
        copy_bytes_per_s=copied,
        collective_cpu_s=cpu_s,
        plain=plain,
        scheduled=scheduled,
    )
    return asdict(measured)


def _collective_cpu_s(tries: int) -> float:
    began_s = time.process_time()
    all_reduces_s(_COLLECTIVE_BYTES, tries)
    return (time.process_time() - began_s) / (2 * tries + 1)


def _cores_per_rank(ranks: Ranks) -> float:
    """Of the ranks on this machine, each of which may be bound to cores of its own."""
    here = _BOOT.read_text() if _BOOT.exists() else socket.gethostname()
    found = ranks.gather((here, os.sched_getaffinity(0)))
    of_ranks = [cores for machine, cores in found if machine == here]
    return len(frozenset().union(*of_ranks)) / len(of_ranks)


if __name__ == "__main__":
    run_rank(Probes, _measure)
