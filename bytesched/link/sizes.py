"""Partition and credit sizes where a user leaves them at 0: one table of rules.

The bound ``T* + θN + (c + δ)/B`` (see bound.py) for a model of S bytes, N chunks of δ bytes and a
credit c of k chunks is least at δ = sqrt(θBS/(k + 1)), with θ the overhead of a chunk and B the
rate of the link. What differs between carriers is which overhead shows, and what is known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

KIB, MIB = 2**10, 2**20

#: Chunks in flight: the next one is on its way to the wire while one is on it. A third would only
#: delay what is urgent.
PROBE_WINDOW = 2

_SMALLEST_BYTES = 128 * KIB
_LARGEST_BYTES = 32 * MIB
#: so much less than the best throughput is still called full
_FULL = 0.93


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How the sizes of one kind of carrier are chosen."""

    #: of a partition
    smallest_bytes: int
    largest_bytes: int
    #: θ in seconds; 0: nothing is known of it, and nothing measured
    overhead_s: float = 0.0
    #: k, where nothing else decides it
    window: int = PROBE_WINDOW
    #: a partition is a multiple of this
    step_bytes: int = 1
    #: whether a partition that is chosen has room in a credit that is given; else chunks larger
    #: than the credit go one at a time
    within_credit: bool = True

    def sizes(
        self,
        partition_bytes: int = 0,
        credit_bytes: int = 0,
        *,
        best_bytes: float = 0.0,
        window: int = 0,
    ) -> tuple[int, int]:
        """``(partition_bytes, credit_bytes)``; what is given stays, what is 0 is chosen.

        Args:
            best_bytes: what the formula gives; 0 for a rule without measurement.
            window: k, if it is not the rule's.
        """
        if not partition_bytes:
            partition_bytes = int(min(max(self.smallest_bytes, best_bytes), self.largest_bytes))
            if credit_bytes and self.within_credit:
                partition_bytes = min(partition_bytes, credit_bytes)
            whole = partition_bytes // self.step_bytes * self.step_bytes
            partition_bytes = whole or partition_bytes
        return partition_bytes, credit_bytes or (window or self.window) * partition_bytes


#: One row for each kind of carrier.
RULES: Final = {
    # sqrt(θBS/(2k + 3)): a value passes two pipes, each with a window of k, and the second waits
    # for whole chunks, so the bound is T* + θN + 2(c + δ)/B + δ/B. k depends on the servers. θ is
    # not measured: how long a push and its pull take in turn shows little of those that follow one
    # another; with this one, sizes are within 4 % of the fastest ones tried where a worker pushed
    # 15 to 120 MB/s. A kernel may round the tail of a chunk otherwise than its vectors, so chunks
    # are whole pages.
    "store": Rule(
        smallest_bytes=64 * KIB, largest_bytes=8 * MIB, overhead_s=1e-4, step_bytes=4 * KIB
    ),
    # Keys come one after another, and nothing is measured before the first. k depends on the
    # servers.
    "store calls": Rule(smallest_bytes=MIB, largest_bytes=MIB, within_credit=False),
    # Nothing is measured before the keys are cut. At 1 Gbit/s these came to 1.06 to 1.12 x T*.
    "mxnet": Rule(smallest_bytes=256 * KIB, largest_bytes=256 * KIB, window=4, within_credit=False),
    # What travels between ranks is known from the first step on; nothing is measured before it.
    "stages": Rule(smallest_bytes=MIB, largest_bytes=MIB),
}


@dataclass(frozen=True, slots=True)
class Probe:
    """All-reduces of ``nbytes``, ``PROBE_WINDOW`` of them at a time."""

    nbytes: int
    bytes_per_s: float
    #: CPU time of this process for each
    cpu_s: float = 0.0


def probe_sizes(measure: Callable[[int], Probe], model_bytes: int = 1 << 62) -> list[Probe]:
    """Probes of doubling sizes, until twice the size no longer is faster.

    Args:
        model_bytes: of all gradients together. From the third size on, the probes under way take
            no more: they come before the arena, which takes as much.
    """
    probes = [measure(_SMALLEST_BYTES)]
    largest_bytes = min(_LARGEST_BYTES, max(4 * _SMALLEST_BYTES, model_bytes // PROBE_WINDOW))
    while 2 * probes[-1].nbytes <= largest_bytes:
        probes.append(measure(2 * probes[-1].nbytes))
        best = max(probe.bytes_per_s for probe in probes)
        if len(probes) > 2 and probes[-3].bytes_per_s >= _FULL * best:
            break
    return probes
