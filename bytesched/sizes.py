"""Partition and credit sizes from what the link can do."""

from __future__ import annotations

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
#: the partition over the smallest one that fills the link: its overhead is also CPU time, which
#: the model needs
_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class Probe:
    """How fast all-reduces of ``nbytes`` are, ``PROBE_WINDOW`` of them at a time."""

    nbytes: int
    bytes_per_s: float


def probe_sizes(measure: Callable[[int], float]) -> list[Probe]:
    """Probes of doubling sizes, until twice the size no longer is faster.

    ``measure(nbytes)`` returns bytes per second.
    """
    probes = [Probe(_SMALLEST_BYTES, measure(_SMALLEST_BYTES))]
    while probes[-1].nbytes < _LARGEST_BYTES:
        nbytes = 2 * probes[-1].nbytes
        probes.append(Probe(nbytes, measure(nbytes)))
        if len(probes) > 2 and probes[-3].bytes_per_s >= _FULL * max(
            probe.bytes_per_s for probe in probes
        ):
            break
    return probes


def chosen_sizes(
    probes: list[Probe], *, partition_bytes: int = 0, credit_bytes: int = 0
) -> tuple[int, int]:
    """``(partition_bytes, credit_bytes)``; what is given stays, what is 0 is chosen.

    The bound ``T* + θN + (c + δ)/B`` (see bound.py) wants chunks as small as the overhead allows,
    and no more in flight than keeps the link full. With two chunks in flight the overhead of one
    hides behind the other, so it costs nothing down to the size at which it no longer does: the
    smallest partition that still fills the link.
    """
    if not partition_bytes:
        best = max(probe.bytes_per_s for probe in probes)
        fills = min(p.nbytes for p in probes if p.bytes_per_s >= _FULL * best)
        partition_bytes = int(_MARGIN * fills)
        if credit_bytes:
            partition_bytes = min(partition_bytes, credit_bytes)
    if not credit_bytes:
        credit_bytes = PROBE_WINDOW * partition_bytes
    return partition_bytes, credit_bytes
