"""Jobs that rest and wake all the time, whatever that brings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from training import Job

from bytesched.config import Config
from bytesched.plugins.engine import warming
from bytesched.plugins.engine.lending import alternation_for
from bytesched.plugins.engine.resting import Alternation, Report


class Restless(Alternation):
    """Changes after every round or two, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(4)
        self.changes = 0
        self._begin(resting=False, rounds=1)

    def decide(self, reports: Sequence[Report]) -> None:
        self.changes += 1
        self._begin(resting=not self.is_resting, rounds=self._random.choice((1, 1, 2)))


class RestedJob(Job):
    """A job whose wrapped run changes between rest and scheduling all the time."""

    def __init__(self, *, wrapped: bool, **fields: Any) -> None:
        super().__init__(wrapped=wrapped, **fields)
        self.alternations: list[Restless] = []
        if wrapped:
            vars(warming)["alternation_for"] = self._new

    def _new(self, config: Config) -> Alternation | None:
        # Sizes are given: they make many chunks of a small model.
        if config.shard or config.tune or config.split == "on":
            return None
        self.alternations.append(Restless())
        return self.alternations[-1]

    def close(self) -> None:
        try:
            super().close()
        finally:
            vars(warming)["alternation_for"] = alternation_for
        self.stats["changes"] = sum(one.changes for one in self.alternations)
