"""Turns with the plan and without it: where it is not faster, DDP goes on as the script made it.

All ranks take the same turns and see the same numbers. Without the plan no hook of ours counts
rounds: a round is a backward pass in which DDP's own back end got collectives, which every rank
makes alike. What ranks tell each other is read a round later, so that no rank waits for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from bytesched.verdict import MOST_TURNS, Comparison, Verdict, compared

from .clocks import Clock
from .wire import Wire

#: iterations of a block that count; the first one is short, so that a slow plan is soon left
_COUNTED: Final = 8
_COUNTED_FIRST: Final = 4
#: rounds before the first block: by then there is a plan; and before a block after another one
_SETTLED: Final = 7
_SETTLED_AGAIN: Final = 6
#: rounds of a new reducer that do not count: after the first one it has other buckets
_SETTLED_PLAIN: Final = 2
#: rounds from a decision to the next turns, and how many times as many after those
_LASTS: Final = 2000
_GROWTH: Final = 4
#: rounds after which ranks that stood aside first ask whether iterations have changed by a fifth
_ASKED_AFTER: Final = 250
_CHANGED: Final = 0.2


def collectives_of(ddp: DistributedDataParallel, device: torch.device) -> Callable[[], int] | None:
    """How many collectives were issued on what carries gradients of ``ddp``; None: not counted."""
    backend: Any = ddp.process_group._get_backend(device)
    try:
        backend._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return None
    counted: Callable[[], int] = backend._get_sequence_number_for_group
    return counted


class Guard:
    """The turns of one session.

    Args:
        clock: of what computes the model.
    """

    def __init__(self, wire: Wire, clock: Clock) -> None:
        self._wire = wire
        self._clock = clock
        #: what has been compared since the last decision, in seconds, of the slowest rank
        self._plain_s: list[list[float]] = []
        self._planned_s: list[list[float]] = []
        self._turns = 0
        #: iterations of the current turn's blocks that count
        self._counted = _COUNTED_FIRST
        #: for how many rounds the next decision holds, and how soon ranks ask whether it does
        self._lasts = _LASTS
        self._asked_after = _ASKED_AFTER
        #: what the last decision was made from
        self.decision: Comparison | None = None
        #: DDP goes on by itself until iterations have changed, or for a while
        self.is_aside = False
        #: the plan is to be in force again
        self.is_planned_next = False
        #: the round of the plan with which its block begins, and how many come before the next one
        self._begins: float = _SETTLED
        self._settles: float = _SETTLED_AGAIN
        #: ends of iterations of a block; the first one is its beginning
        self._moments: deque[Any] = deque(maxlen=_COUNTED + 1)
        self._planned_moments: tuple[Any, ...] = ()
        #: rounds at the last forward pass with the plan
        self._planned_rounds = 0
        #: rounds without it since it was left, and at the last forward pass
        self._plain_rounds = self._plain_rounds_seen = 0
        #: those after which ranks tell each other something; and what, with the work
        self._tells_after = 0
        self._told: tuple[torch.Tensor, Any] | None = None

    def planned_forward(self, rounds: int) -> bool:
        """A forward pass with the plan begins, after so many ``rounds``; whether its block is over.

        Where it is over and the plan is not left, it is so in later forward passes, too.
        """
        if rounds != self._planned_rounds:
            self._planned_rounds = rounds
            if rounds >= self._begins:
                self._moments.append(self._clock.moment())
        return rounds >= self._begins + self._counted

    def plain_begins(self) -> None:
        """DDP is by itself from the current forward pass on."""
        self._planned_moments = tuple(self._moments)
        self._moments.clear()
        self._plain_rounds = self._plain_rounds_seen = 0
        self._tells_after = _SETTLED_PLAIN + self._counted

    def planned_begins(self, rounds: int) -> None:
        """The plan is in force again from the current forward pass on, after so many ``rounds``."""
        self._begins = rounds + self._settles
        self._planned_rounds = rounds
        self._moments.clear()
        self.is_planned_next = False

    def plain_round_ends(self) -> None:
        """A backward pass without the plan was a round."""
        self._plain_rounds += 1

    def plain_forward(self) -> None:
        """A forward pass without the plan begins. Raises `TransportError`."""
        rounds = self._plain_rounds
        if rounds == self._plain_rounds_seen:
            return
        self._plain_rounds_seen = rounds
        if rounds >= _SETTLED_PLAIN:
            self._moments.append(self._clock.moment())
        if self._told is not None:
            # All ranks have made a round since they told it.
            told, work = self._told
            self._told = None
            self._wire.wait(work, "what ranks compare")
            (self._look_again if self.is_aside else self._decide)(told.tolist())
        elif rounds >= self._tells_after:
            self._tell(self._changes() if self.is_aside else self._blocks())

    def _tell(self, numbers: Iterable[float]) -> None:
        told = torch.tensor([*numbers], dtype=torch.float64, device="cpu")
        self._told = told, self._wire.start_largest(told)

    # -- a decision --------------------------------------------------------------------

    def _blocks(self) -> list[float]:
        """How many iterations there are of each block, negative, and what they took."""
        blocks = [self._lasted(moments) for moments in (self._planned_moments, self._moments)]
        self._planned_moments = ()
        filled = [[*block, *[0.0] * (_COUNTED - len(block))] for block in blocks]
        return [-float(min(map(len, blocks))), *filled[0], *filled[1]]

    def _lasted(self, moments: Iterable[Any]) -> list[float]:
        return [self._clock.seconds(began, ended) for began, ended in pairwise(moments)]

    def _decide(self, told: list[float]) -> None:
        least, planned_s, plain_s = -int(told[0]), told[1 : 1 + _COUNTED], told[1 + _COUNTED :]
        if least:
            self._planned_s.append(planned_s[:least])
            self._plain_s.append(plain_s[:least])
        self._turns += 1
        self._counted, self._settles = _COUNTED, _SETTLED_AGAIN
        verdict = Verdict.OPEN
        if self._plain_s:
            comparison = compared(self._plain_s, self._planned_s)
            verdict = comparison.verdict(self._turns)
        elif self._turns == MOST_TURNS:
            # Nothing can be compared: several rounds lie between two forward passes.
            self._settles = inf
        self.is_planned_next = verdict is not Verdict.PLAIN
        if verdict is Verdict.OPEN:
            return
        self.decision = comparison
        self._turns, self._plain_s, self._planned_s = 0, [], []
        if verdict is Verdict.PLANNED:
            self._settles = self._lasts
            self._lasts *= _GROWTH
        else:
            self.is_aside = True
            self._tells_after = self._plain_rounds + self._asked_after

    def _changes(self) -> list[float]:
        """Whether iterations have changed since DDP was left alone, or have not for long."""
        assert self.decision is not None
        before_s, lasted = self.decision.plain_s, self._lasted(self._moments)
        is_changed = bool(lasted) and abs(median(lasted) - before_s) > _CHANGED * before_s
        return [float(is_changed), float(self._plain_rounds >= self._lasts)]

    def _look_again(self, told: list[float]) -> None:
        if not any(told):
            self._tells_after = self._plain_rounds + self._asked_after
            return
        self._lasts *= _GROWTH
        self._asked_after *= _GROWTH
        self.is_aside = False
        self.is_planned_next = True

    def figures(self) -> dict[str, int | float | str]:
        """Of the last comparison, for `stats()`; nothing before there is one."""
        if (decision := self.decision) is None:
            return {}
        return {
            "plain_ms": 1e3 * decision.plain_s,
            "planned_ms": 1e3 * decision.planned_s,
            "speedup": decision.ratio,
            "stood_aside": int(self.is_aside),
            "guard": str(decision),
        }
