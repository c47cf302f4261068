"""The cores of a rank, which its threads share: how much longer each takes for it.

The model is processor sharing that wastes nothing: a thread runs at the speed of one core, or of
what the others leave, or of its fair share if that is more. What the others want is what they use
on average at full speed, so that no time depends on another one that is stretched. With fewer cores
nothing becomes faster, and with enough of them nothing is stretched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Cores"]


@dataclass(frozen=True, slots=True)
class Cores:
    """What one rank has; ranks on one machine have a part of it each."""

    per_rank: float = math.inf

    def __post_init__(self) -> None:
        if not self.per_rank > 0:
            raise ValueError(f"{self.per_rank} cores: a rank needs a part of one at least")

    def left(self, others: float) -> float:
        """Cores for threads beside others that want ``others`` of them."""
        fair = self.per_rank / (1.0 + max(1.0, others)) if others else self.per_rank
        return max(self.per_rank - others, fair)

    def stretch(self, wanted: float, others: float = 0.0) -> float:
        """How many times as long work takes that wants ``wanted`` cores for all of its time."""
        return max(1.0, wanted / self.left(others))
