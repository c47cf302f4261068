"""How fast a worker pushes to its servers while all others push, too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Final

import torch

from .workers import Workers

__all__ = ["push_bytes_per_s"]

_PROBE_BYTES: Final = 2**20
_ROUNDS: Final = 3


def push_bytes_per_s(workers: Workers, servers: int) -> float:
    """The rate of one worker's pushes, the same on all workers; collective.

    As many keys as servers are pushed, and pulled when they are there: every byte passes twice.
    """
    probes = [torch.zeros(_PROBE_BYTES // 4) for _ in range(servers)]
    keys = [f"probe {number}" for number in range(servers)]
    for probe, key in zip(probes, keys, strict=True):
        # Makes the key, and opens a connection.
        workers.sum(probe, key)
    rounds_s = []
    with ThreadPoolExecutor(servers) as pool:
        for _ in range(_ROUNDS):
            # The sum before has ended everywhere at nearly the same moment.
            began_s = perf_counter()
            list(pool.map(workers.sum, probes, keys))
            rounds_s.append(perf_counter() - began_s)
    for probe, key in zip(reversed(probes), reversed(keys), strict=True):
        workers.forget(probe, key)
    mine = 2 * servers * _PROBE_BYTES / min(rounds_s)
    # A worker that starts late sees a free link.
    return min(float(text) for text in workers.gather_text("rate", repr(mine)))
