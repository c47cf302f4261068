"""Where to look for a setting, from the link and the model: the seed, and the space around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from bytesched.link.bound import partition_seed_bytes
from bytesched.link.sizes import Probe
from bytesched.tunable import RunFacts

from .space import Limits, Range, Space

__all__ = ["Link", "fit_probes", "seed_bytes", "seeded_space"]

#: of the CPU time that a chunk costs, the process sees about half; the rest is the kernel's
_UNSEEN = 2.0
#: partitions are looked for from the untuned one over this to the larger seed times that
_BELOW, _ABOVE = 4, 16
_SMALLEST_BYTES = 32 * 1024
_LARGEST_BYTES = 64 << 20
_SEED_WINDOW = 2


@dataclass(frozen=True, slots=True)
class Link:
    """A chunk of n bytes occupies it for ``overhead_s + n / bytes_per_s`` seconds."""

    overhead_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """How long a chunk occupies it."""
        return self.overhead_s + nbytes / self.bytes_per_s

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e6:.4g} MB/s, {1e3 * self.overhead_s:.2g} ms per chunk"


def fit_probes(probes: Sequence[Probe]) -> Link:
    """The link as it is when nothing else runs, from at least one probe, by growing size.

    A line through their times, by Theil and Sen: the slope is the median of those between all
    pairs, which a quarter of wild values does not move.
    """
    points = [(probe.nbytes, probe.nbytes / probe.bytes_per_s) for probe in probes]
    slopes = [
        (high_s - low_s) / (high - low)
        for (low, low_s), (high, high_s) in combinations(points, 2)
        if high > low
    ]
    slope = median(slopes) if slopes else 0.0
    # Two chunks in flight hide their overhead from each other, but not what they cost the cores.
    least_s = _UNSEEN * probes[0].cpu_s
    if slope <= 0:
        # One size, or noise alone: all of the time is the bandwidth's.
        return Link(least_s, median(probe.bytes_per_s for probe in probes))
    overhead_s = median(seconds - slope * nbytes for nbytes, seconds in points)
    return Link(max(overhead_s, least_s), 1 / slope)


def seed_bytes(facts: RunFacts, link: Link) -> int:
    """The partition δ* = sqrt(θBS/(k + 1)) that the bound wants (see bound.py)."""
    return partition_seed_bytes(
        total_bytes=facts.model_bytes,
        overhead_s=link.overhead_s,
        bytes_per_s=link.bytes_per_s,
        credit_partitions=_SEED_WINDOW,
    )


def seeded_space(limits: Limits, facts: RunFacts, link: Link) -> Space:
    """The space around what the link wants and what would hold without a tuner."""
    centers = (facts.untuned.partition_bytes, seed_bytes(facts, link))
    # Below what fills the link there are only more chunks.
    low = max(_power_of_two(facts.untuned.partition_bytes // _BELOW), _SMALLEST_BYTES)
    high = min(_power_of_two(max(centers) * _ABOVE), _LARGEST_BYTES)
    # A partition beyond the model is the model.
    high = min(high, 2 * _power_of_two(facts.model_bytes))
    return Space(limits.closed(Range(low, max(low, high))))


def _power_of_two(number: int) -> int:
    """The largest one that is not above."""
    return 1 << (max(number, 1).bit_length() - 1)
