"""What differs between ranks and between iterations: jitter, a straggler, bursts, a drift."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bytesched.link.cluster import Weather

__all__ = ["Climate"]

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Climate:
    """Where weather comes from; the same for every system."""

    #: standard deviation of the logarithm of a rank's pace in an iteration
    jitter: float = 0.0
    #: a rank that always computes so many times as long
    straggler: int = -1
    late: float = 1.0
    #: the chance of a rank, in an iteration, to take `stalled` times as long
    bursts: float = 0.0
    stalled: float = 2.0
    #: how many times as long the links take in the last iteration as in the first
    drift: float = 1.0

    @property
    def is_calm(self) -> bool:
        """Whether all iterations are alike."""
        return not (self.jitter or self.bursts) and self.drift == 1.0

    def slowest(self, ranks: int, iterations: int) -> float:
        """How many times as long the slowest rank computes, on average."""
        paces = [max(weather.pace) for weather in self.weather(ranks, iterations)]
        return sum(paces) / len(paces)

    def weather(self, ranks: int, iterations: int) -> Iterator[Weather]:
        """That of so many iterations, the same each time it is asked for."""
        chance = random.Random(_SEED)
        for iteration in range(iterations):
            pace = [chance.lognormvariate(0.0, self.jitter) for _ in range(ranks)]
            if self.bursts:
                pace = [
                    each * (self.stalled if chance.random() < self.bursts else 1.0) for each in pace
                ]
            if 0 <= self.straggler < ranks:
                pace[self.straggler] *= self.late
            share = iteration / max(iterations - 1, 1)
            yield Weather(tuple(pace), self.drift**share)
