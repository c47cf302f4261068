"""The link as a line: a start-up time and a bandwidth, from all-reduces that were measured.

By Theil and Sen: the slope is the median of those between all pairs of sizes, which a quarter of
wild values does not move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from bytesched.link.sizes import Probe

__all__ = ["Link", "fit_link", "fit_probes"]

#: of the CPU time that a chunk costs, the process sees about half; the rest is the kernel's
_UNSEEN = 2.0
#: times of about one size count as one point
_PER_OCTAVE = 8


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


def fit_link(samples: Iterable[tuple[int, float]]) -> Link | None:
    """The line through (bytes, seconds); None if there is nothing to draw it through."""
    points = _points(samples)
    if not points:
        return None
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in combinations(points, 2)
    ]
    slope = median(slopes) if slopes else 0.0
    if slope <= 0:
        # One size, or noise alone: all of the time is the bandwidth's.
        return Link(0.0, median(nbytes / seconds for nbytes, seconds in points))
    overhead_s = median(seconds - slope * nbytes for nbytes, seconds in points)
    return Link(max(overhead_s, 0.0), 1 / slope)


def fit_probes(probes: Sequence[Probe]) -> Link:
    """The link as it is when nothing else runs, from at least one probe of the warm-up."""
    link = fit_link((probe.nbytes, probe.nbytes / probe.bytes_per_s) for probe in probes)
    if link is None:
        raise ValueError(f"no line goes through {probes}")
    # Two chunks in flight hide their overhead from each other, but not what they cost the cores.
    return replace(link, overhead_s=max(link.overhead_s, _UNSEEN * probes[0].cpu_s))


def _points(samples: Iterable[tuple[int, float]]) -> list[tuple[float, float]]:
    """One point for each size, by growing size: the median of its times."""
    by_size: dict[int, list[tuple[int, float]]] = {}
    for nbytes, seconds in samples:
        if nbytes > 0 and 0 < seconds < math.inf:
            by_size.setdefault(round(_PER_OCTAVE * math.log2(nbytes)), []).append((nbytes, seconds))
    return [
        (median(nbytes for nbytes, _ in group), median(seconds for _, seconds in group))
        for _, group in sorted(by_size.items())
    ]
