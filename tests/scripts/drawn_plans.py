"""What a training that is drawn consists of, and how exactly it must be as plain training is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from drawn_optimizers import LATE_STEPS

#: where something may happen to a rank, in the order of a round
MOMENTS = ("zeroed", "accumulated", "forward", "backward", "before_step", "after_step")
#: loops, with how often each is drawn
LOOPS = {"one": 6.0, "several": 2.0, "two_models": 2.0, "gan": 2.0, "joint": 0.5}


@dataclass(frozen=True)
class Plan:
    """A training; what it does in its rounds is drawn from `seed`."""

    seed: str
    world_size: int = 2
    loop: str = "one"
    #: names of `drawn_optimizers`
    optimizers: tuple[str, ...] = ("adamw",)
    #: fields of Config
    options: dict[str, Any] = field(default_factory=dict)
    #: no acts in between, and no backward pass inside `step()`
    calm: bool = False

    @property
    def rounds(self) -> int:
        if "Late" in self.optimizers:
            return LATE_STEPS
        return 4 + random.Random(f"{self.seed} rounds").randrange(4)

    @property
    def is_sharded(self) -> bool:
        return bool(self.options.get("shard"))

    @property
    def makes_norms_of_parts(self) -> bool:
        """Norms of large gradients are made of those of what ranks own, which rounds otherwise."""
        return self.is_sharded

    def rtol(self, record: str) -> float:
        """How far a record may be from that of plain training; 0: every bit is the same."""
        is_norm = record in ("norm", "norms", "total")
        return 1e-6 if is_norm and self.makes_norms_of_parts else 0.0
