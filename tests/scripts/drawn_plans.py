"""What a training that is drawn consists of, and how exactly it must be as plain training is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from drawn_optimizers import UNKNOWN, VOUCHED
from scripts_optimizers import SPLITTABLE

#: where something may happen to a rank, in the order of a round
MOMENTS = ("zeroed", "accumulated", "forward", "backward", "before_step", "after_step")
#: of every wait of ours; ranks that end are heard of long before
TIMEOUT_S = 15.0

#: fields of Config, by mode
MODES: dict[str, dict[str, Any]] = {
    "wrap": {},
    "whole": {"split": "off"},
    "shard": {"shard": True},
    "barrier": {"cross_barrier": False},
}
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


def plan_of(draw: random.Random, seed: str, kind: str) -> Plan:
    """What is trained in a turn of that kind."""
    mode = draw.choice(list(MODES))
    loop = draw.choices(list(LOOPS), list(LOOPS.values()))[0]
    if kind == "skipped" and loop == "gan":
        loop = "one"  # a rank that leaves out the rest would not train the generator, too
    count = {"several": draw.randint(2, 3), "two_models": 2, "gan": 2}.get(loop, 1)
    known = sorted(SPLITTABLE)
    names = [
        draw.choice(draw.choices((known, list(UNKNOWN), list(VOUCHED)), (4, 5, 1))[0])
        for _ in range(count)
    ]
    if loop == "gan" or kind != "compared":
        # It needs a closure.
        names = ["adamw" if name == "LBFGS" else name for name in names]
    partition_bytes = draw.choice((0, 256, 1000, 4096))
    options = {
        "partition_bytes": partition_bytes,
        "credit_bytes": draw.choice((0, 1, 2)) * (partition_bytes or 1 << 16),
        "policy": draw.choice(("priority", "fifo")),
        "timeout_s": TIMEOUT_S,
    }
    return Plan(
        seed,
        world_size=draw.choice((2, 2, 3, 4) if kind == "compared" else (2, 3, 4)),
        loop=loop,
        optimizers=tuple(names),
        options=options | MODES[mode],
        calm=kind != "compared",
    )
