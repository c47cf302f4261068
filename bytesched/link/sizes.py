"""Partition and credit sizes from what the link can do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["PROBE_WINDOW", "Probe", "chosen_sizes", "probe_sizes"]

#: Chunks in flight: the next one is on its way to the wire while one is on it. A third would only
#: delay what is urgent.
PROBE_WINDOW = 2

_SMALLEST_BYTES = 128 * 1024
_LARGEST_BYTES = 32 * 2**20
#: so much less than the best throughput is still called full
_FULL = 0.93
#: the partition over the smallest one that fills the link
_MARGIN = 1.5


#: of the CPU time that a chunk costs, the process sees about half; the rest is the kernel's
_UNSEEN = 2.0
#: where ranks share cores, a model that is always computing gets half of the time
_BUSY = 2.0
#: chunks in flight when the cores are busy: threads wake up late, and the wire must not wait
_BUSY_WINDOW = 4


@dataclass(frozen=True, slots=True)
class Probe:
    """All-reduces of ``nbytes``, ``PROBE_WINDOW`` of them at a time."""

    nbytes: int
    bytes_per_s: float
    #: CPU time of this process for each
    cpu_s: float = 0.0


def probe_sizes(measure: Callable[[int], Probe]) -> list[Probe]:
    """Probes of doubling sizes, until twice the size no longer is faster."""
    probes = [measure(_SMALLEST_BYTES)]
    while probes[-1].nbytes < _LARGEST_BYTES:
        probes.append(measure(2 * probes[-1].nbytes))
        best = max(probe.bytes_per_s for probe in probes)
        if len(probes) > 2 and probes[-3].bytes_per_s >= _FULL * best:
            break
    return probes


def chosen_sizes(
    probes: list[Probe],
    *,
    model_bytes: int,
    cpu_load: float,
    hides_overhead: bool = True,
    partition_bytes: int = 0,
    credit_bytes: int = 0,
) -> tuple[int, int]:
    """``(partition_bytes, credit_bytes)``; what is given stays, what is 0 is chosen.

    The bound ``T* + θN + (c + δ)/B`` (see bound.py) wants chunks as small as the overhead θ
    allows, and no more in flight than keeps the link full. With two chunks in flight the link's
    own overhead hides, down to the smallest partition that still fills it. What does not hide is
    the CPU time of a chunk, as far as the model computes on the same cores, and the overhead of a
    link that is silent between two chunks: there the bound is least at ``sqrt(θBS/(k + 1))``,
    with a window of k chunks.

    Args:
        probes: what the link does.
        model_bytes: all gradients together, S.
        cpu_load: CPU time of a training step over its time, without communication.
        hides_overhead: whether the link is busy while the next chunk is prepared.
    """
    busy = min(_BUSY * cpu_load, 1.0)
    if not partition_bytes:
        fastest = max(probe.bytes_per_s for probe in probes)
        fills = min(p.nbytes for p in probes if p.bytes_per_s >= _FULL * fastest)
        overhead_s = _UNSEEN * probes[0].cpu_s * busy
        smallest = _MARGIN * fills
        if not hides_overhead:
            # What a probe takes has its CPU time in it.
            overhead_s = max(overhead_s, _startup_s(probes))
            smallest = _SMALLEST_BYTES
        least = math.sqrt(overhead_s * fastest * model_bytes / (PROBE_WINDOW + 1))
        partition_bytes = int(min(max(smallest, least), _LARGEST_BYTES))
        if credit_bytes:
            partition_bytes = min(partition_bytes, credit_bytes)
    if not credit_bytes:
        # A link that is silent between two chunks has one under way and finds the next announced:
        # a third would only stand before what is more urgent.
        late = busy if hides_overhead else 0.0
        window = PROBE_WINDOW + round((_BUSY_WINDOW - PROBE_WINDOW) * late)
        credit_bytes = window * partition_bytes
    return partition_bytes, credit_bytes


def _startup_s(probes: list[Probe]) -> float:
    """What a chunk takes however small it is: the line through the first and the last probe."""
    small, large = probes[0], probes[-1]
    small_s, large_s = small.nbytes / small.bytes_per_s, large.nbytes / large.bytes_per_s
    slope = (large_s - small_s) / (large.nbytes - small.nbytes)
    return max(0.0, small_s - slope * small.nbytes)
