"""What ranks do whose session rests when something goes wrong."""

from __future__ import annotations

from collections.abc import Sequence

from faults_cases import train_until_fault

from bytesched.config import Config
from bytesched.plugins.engine import warming
from bytesched.plugins.engine.resting import Alternation, Report

#: The fourth round is the first one that is rested.
RESTED_STEP = 6


class AtRest(Alternation):
    """Rests as soon as it can, and for ever."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self._begin(resting=False, rounds=1)

    def decide(self, reports: Sequence[Report]) -> None:
        self._begin(resting=True, rounds=1 << 40)


def at_rest_until_fault(victim: int, moment: str, fault: str, timeout_s: float) -> None:
    """See `train_until_fault`; gradients are DDP's at that moment."""
    vars(warming)["alternation_for"] = AtRest
    # Whoever watches a session keeps it from resting.
    fields = {"timeline": ""}
    train_until_fault(victim, moment, fault, timeout_s, RESTED_STEP, fields, at_rest=True)
