"""How long a collective takes: a function of ranks, bytes and algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bytesched.link.sizes import PROBE_WINDOW, Probe, probe_sizes

__all__ = ["ALGORITHMS", "Fabric"]

#: Messages one after another, and bytes that each link carries in either direction per byte, of an
#: all-reduce among n ranks.
ALGORITHMS: Final[dict[str, tuple[Callable[[int], int], Callable[[int], float]]]] = {
    # Each rank sends 1/n of the bytes to its neighbour, 2(n-1) times.
    "ring": (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    # Up one binary tree and down, in pieces that follow one another.
    "tree": (lambda n: 2 * math.ceil(math.log2(n)), lambda n: 2.0),
    # Each rank sends every other one its share at once, and then its sum.
    "exchange": (lambda n: 2, lambda n: 2 * (n - 1) / n),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The links of n ranks, each as fast, and how collectives use them.

    A collective begins when its last rank has issued it and those before it have left the links,
    occupies them for `occupied_s`, and is across `start_up_s` later.
    """

    ranks: int
    #: of each link, in either direction
    bytes_per_s: float
    #: of one message: start-up and way
    latency_s: float
    algorithm: str = "ring"
    #: what a collective occupies the links for besides its bytes
    overhead_s: float = 0.0
    #: what it takes besides the messages of its algorithm
    delay_s: float = 0.0
    #: whether the next collective's bytes use the links while messages of this one are on the way
    overlaps: bool = True

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"{self.ranks} ranks have nothing to send each other: at least 2")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"no algorithm {self.algorithm!r}; there are {', '.join(ALGORITHMS)}")
        if not self.bytes_per_s > 0 or min(self.latency_s, self.overhead_s, self.delay_s) < 0:
            raise ValueError(f"no such links: {self}")

    @property
    def gradient_bytes_per_s(self) -> float:
        """Bytes of gradients that all-reduces average per second, without any start-up."""
        return self.bytes_per_s / ALGORITHMS[self.algorithm][1](self.ranks)

    def occupied_s(self, nbytes: float, share: float = 1.0) -> float:
        """How long the links carry ``share`` of an all-reduce: 1/2 is a reduce-scatter."""
        busy_s = self.overhead_s + share * nbytes / self.gradient_bytes_per_s
        return busy_s if self.overlaps else busy_s + self._messages_s(share)

    def start_up_s(self, share: float = 1.0) -> float:
        """How much later it is across."""
        return self.delay_s + (self._messages_s(share) if self.overlaps else 0.0)

    def _messages_s(self, share: float) -> float:
        return share * ALGORITHMS[self.algorithm][0](self.ranks) * self.latency_s

    def probes(self, cpu_s: float = 0.0) -> list[Probe]:
        """What a warm-up would measure: all-reduces of growing sizes, some at a time."""

        def measure(nbytes: int) -> Probe:
            occupied_s = self.occupied_s(nbytes)
            each_s = max(occupied_s, (occupied_s + self.start_up_s()) / PROBE_WINDOW)
            return Probe(nbytes, nbytes / each_s, cpu_s)

        return probe_sizes(measure)
