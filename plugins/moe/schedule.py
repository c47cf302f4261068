"""The temperature of a gate, which falls step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bytesched.errors import ConfigError

__all__ = ["Temperature"]


@dataclass(frozen=True)
class Temperature:
    """A temperature that falls from ``first`` to ``last`` within ``steps`` steps, and stays there.

    Exponential: ``max(first * exp(step * ln(last / first) / steps), last)``. Linear:
    ``max(first - step * (first - last) / steps, last)``. Both are EvoMoE's, as are 1.0 and 0.5.
    """

    steps: int
    first: float = 1.0
    last: float = 0.5
    is_linear: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.last <= self.first:
            raise ConfigError(f"{self!r}: steps must be positive, and first >= last > 0")

    def at(self, step: int) -> float:
        """The temperature of a step; they count from 0."""
        share = step / self.steps
        if self.is_linear:
            return max(self.first - share * (self.first - self.last), self.last)
        return max(self.first * math.exp(share * math.log(self.last / self.first)), self.last)
