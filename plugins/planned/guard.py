"""Turns with the plan and without it: where it is not faster, DDP goes on as the script made it.

All ranks take the same turns and see the same numbers. While the plan is in force they count its
rounds. Without it no hook of ours counts, and they count the collectives on DDP's own group, which
every rank makes in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import inf, isfinite
from statistics import median
from time import perf_counter_ns
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from bytesched.verdict import Comparison, Verdict, compared

from .clocks import Clock
from .wire import Wire

__all__ = ["Guard", "collectives_of"]

#: iterations of a block that count
_COUNTED: Final = 8
#: rounds before the first block: by then there is a plan; and before a block after another one
_SETTLED: Final = 18
_SETTLED_AGAIN: Final = 10
#: iterations of a new reducer that do not count: after the first one it has other buckets
_SETTLED_PLAIN: Final = 2
#: rounds of a block without the plan, by which it ends: the number of buckets is estimated
_PLAIN_ROUNDS: Final = _SETTLED_PLAIN + _COUNTED + 2
#: rounds from a decision to the next turns, and how many times as many after those
_LASTS: Final = 2000
_GROWTH: Final = 4
#: rounds after which ranks that stood aside first ask whether iterations are others, by a fifth
_ASKED_AFTER: Final = 250
_CHANGED: Final = 0.2
_S: Final = 1e9


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
        collectives: how many were issued on DDP's own group; see `collectives_of`.
        buckets: about as many as DDP has by itself.
    """

    def __init__(
        self, wire: Wire, clock: Clock, collectives: Callable[[], int], buckets: int
    ) -> None:
        self._wire = wire
        self._clock = clock
        self._collectives = collectives
        self._buckets = buckets
        #: what has been compared since the last decision, in seconds, of the slowest rank
        self._plain_s: list[float] = []
        self._planned_s: list[float] = []
        self._turns = 0
        #: for how many rounds the next decision holds
        self._lasts = _LASTS
        self._asked_after = _ASKED_AFTER
        #: rounds of the plan before its next block
        self._settles = _SETTLED_AGAIN
        #: what the last decision was made from
        self.decision: Comparison | None = None
        #: DDP goes on by itself until iterations have changed, or for a while
        self.is_aside = False
        #: the round with which a block begins
        self._begins = _SETTLED
        #: ends of iterations of a block; the first one is its beginning
        self._moments: deque[Any] = deque(maxlen=_COUNTED + 1)
        self._planned_moments: list[Any] = []
        #: rounds or collectives at the last forward pass
        self._seen = 0
        #: collectives at the end of the last round of the plan, and those beside a round
        self._counted = self._beside = 0
        #: collectives at which a block without the plan ends
        self._ends = 0
        #: iterations since the plan was left
        self._left = 0

    # -- with the plan -----------------------------------------------------------------

    def round_ends(self) -> None:
        """A round of the plan is complete, in its backward pass."""
        counted = self._collectives()
        self._beside, self._counted = counted - self._counted, counted

    def planned_begins(self, rounds: int) -> None:
        """The plan is in force again, after so many ``rounds``."""
        self._begins = rounds + self._settles
        self._seen = rounds
        self._moments.clear()

    def is_over(self, rounds: int) -> bool:
        """A forward pass with the plan begins after ``rounds``; whether its block is over."""
        if rounds == self._seen or rounds < self._begins:
            return False
        self._seen = rounds
        self._moments.append(self._clock.moment())
        return rounds >= self._begins + _COUNTED

    # -- without it --------------------------------------------------------------------

    def can_leave(self) -> bool:
        """A block with the plan is over; whether all ranks would know when the next one is.

        Collective. Raises `TransportError`.
        """
        self._ends = self._counted + _PLAIN_ROUNDS * self._per_round
        latest, earliest = self._largest([float(self._ends), -float(self._ends)])
        return latest == -earliest

    def plain_begins(self) -> None:
        """DDP is by itself from the current forward pass on."""
        self._planned_moments = list(self._moments)
        self._moments.clear()
        self._left = 0
        self._seen = self._collectives()

    @property
    def _per_round(self) -> int:
        return self._buckets + self._beside

    def is_planned_next(self) -> bool:
        """A forward pass without the plan begins; whether it is the plan's turn.

        Collective where a block is over. Raises `TransportError`.
        """
        counted = self._collectives()
        if counted == self._seen:
            return False
        self._seen = counted
        self._left += 1
        if self.is_aside:
            self._moments.append(perf_counter_ns())
        elif self._left >= _SETTLED_PLAIN:
            self._moments.append(self._clock.moment())
        if counted < self._ends:
            return False
        return self._looks_again() if self.is_aside else self._decides()

    def _decides(self) -> bool:
        told = self._largest([*self._block(self._planned_moments), *self._block(self._moments)])
        self._planned_moments = []
        if all(map(isfinite, told)):
            self._planned_s += told[:_COUNTED]
            self._plain_s += told[_COUNTED:]
        self._turns += 1
        verdict = Verdict.OPEN
        if self._plain_s:
            comparison = compared(self._plain_s, self._planned_s)
            verdict = comparison.verdict(self._turns)
        self._settles = _SETTLED_AGAIN
        if verdict is Verdict.OPEN:
            return True
        self.decision = comparison
        self._turns, self._plain_s, self._planned_s = 0, [], []
        if verdict is Verdict.PLANNED:
            self._settles = self._lasts
            self._lasts *= _GROWTH
            return True
        self.is_aside, self._left = True, 0
        self._asks_later()
        return False

    def _block(self, moments: Iterable[Any]) -> list[float]:
        """The iterations between ``moments``, as many as count; infinite ones if there are none."""
        lasted = [self._clock.seconds(began, ended) for began, ended in pairwise(moments)]
        middle = median(lasted) if lasted else inf
        return [*lasted, *([middle] * (_COUNTED - len(lasted)))]

    def _asks_later(self) -> None:
        self._moments.clear()
        self._ends += self._asked_after * self._per_round

    def _looks_again(self) -> bool:
        """Ranks that stood aside ask each other whether they go on so."""
        lasted = [ended - began for began, ended in pairwise(self._moments)]
        assert self.decision is not None
        before_s = self.decision.plain_s
        is_changed = bool(lasted) and abs(median(lasted) / _S - before_s) > _CHANGED * before_s
        is_due = self._left >= self._lasts
        if not any(self._largest([float(is_changed), float(is_due)])):
            self._asks_later()
            return False
        self._lasts *= _GROWTH
        self._asked_after *= _GROWTH
        self.is_aside = False
        return True

    def figures(self) -> dict[str, int | float | str]:
        """Of the last comparison, for `stats()`; nothing before there is one."""
        if (decision := self.decision) is None:
            return {}
        return {
            "plain_ms": 1e3 * decision.plain_s,
            "planned_ms": 1e3 * decision.planned_s,
            "speedup": decision.ratio,
            "guard": str(decision),
        }

    def _largest(self, numbers: list[float]) -> list[float]:
        told = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._wire.wait(self._wire.start_largest(told), "what ranks compare")
        largest: list[float] = told.tolist()
        return largest
