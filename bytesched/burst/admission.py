"""Whether a background step may begin: it must be over before the foreground is needed again.

A pure state machine over times, without a clock or a thread. How long a gap lasts and how long a
step takes is predicted from those before, and both to the foreground's advantage: the shortest of
the last gaps of that name, the longest of the last steps.

In every eighth iteration nothing runs in the background; the mean of these is what an iteration
takes without it. The others have a budget: each earns the limit's share of that mean, and pays what
it took beyond it. While the budget is overdrawn no step begins, so that in the long run the
foreground loses no more than the limit, whether a little each time or much now and then. A step
that overdraws it makes the next ones fit more easily.
"""

from __future__ import annotations

import statistics
from collections import deque

#: gaps of one name, and steps, that predictions look back on
_SEEN = 4
#: iterations of either kind that are compared, and whose earnings the budget holds at most
_COMPARED = 12
#: one in so many iterations is without background
CONTROL_EVERY = 8
#: by which the margin grows and shrinks, and the most that it grows to
_GROWTH, _SHRINKAGE, _MOST = 1.3, 0.97, 50.0


class Admission:
    """Decides for one rank.

    Args:
        slowdown_limit: share of the mean iteration time that the foreground may lose, once 16
            iterations have been measured.
    """

    def __init__(self, slowdown_limit: float) -> None:
        if not 0 < slowdown_limit <= 1:
            raise ValueError(f"a slow-down limit of {slowdown_limit}: more than 0, at most 1")
        self._limit = slowdown_limit
        self._gaps: dict[str, deque[int]] = {}
        self._steps: deque[int] = deque(maxlen=_SEEN)
        self._first_step = True
        self._with: deque[int] = deque(maxlen=_COMPARED)
        self._without: deque[int] = deque(maxlen=_COMPARED)
        self._iteration = 0
        self._began_ns: int | None = None
        self._gap: tuple[str, int] | None = None
        #: what the foreground may still lose; overdrawn if negative
        self._budget_ns = 0.0
        #: a background step has ended in this iteration
        self._ran = False
        #: a step must fit so many times into what is left of a gap
        self.margin = 1.0

    @property
    def is_control(self) -> bool:
        """Whether nothing runs in the background of this iteration."""
        return self._iteration % CONTROL_EVERY == 0

    @property
    def slowdown(self) -> float:
        """What the foreground loses to the background, as a share of its time; 0 if unknown."""
        if not self._with or not self._without:
            return 0.0
        return statistics.fmean(self._with) / statistics.fmean(self._without) - 1

    def iteration_begins(self, now_ns: int) -> None:
        self._began_ns = now_ns
        self._ran = False
        self._iteration += 1

    def iteration_ends(self, now_ns: int) -> None:
        """The foreground has ended it; what it does before the next one is not looked at."""
        assert self._began_ns is not None
        # The first ones are spent on warming up.
        if self._iteration <= CONTROL_EVERY:
            return
        took_ns = now_ns - self._began_ns
        if self.is_control:
            self._without.append(took_ns)
            return
        self._with.append(took_ns)
        if not self._without:
            return
        alone_ns = statistics.fmean(self._without)
        earned_ns = self._limit * alone_ns
        self._budget_ns = min(
            self._budget_ns + earned_ns - (took_ns - alone_ns), _COMPARED * earned_ns
        )
        if self._budget_ns >= 0:
            self.margin = max(self.margin * _SHRINKAGE, 1.0)
        elif self._ran:
            self.margin = min(self.margin * _GROWTH, _MOST)

    def gap_begins(self, name: str, now_ns: int) -> None:
        """The foreground waits; gaps of one name recur in every iteration."""
        self._gap = name, now_ns

    def gap_ends(self, now_ns: int) -> None:
        assert self._gap is not None
        name, began_ns = self._gap
        self._gaps.setdefault(name, deque(maxlen=_SEEN)).append(now_ns - began_ns)
        self._gap = None

    def fits(self, now_ns: int) -> bool:
        """Whether a step that begins now ends before the gap does."""
        if self._gap is None or self.is_control or self._budget_ns < 0:
            return False
        name, began_ns = self._gap
        known = self._gaps.get(name, ())
        if len(known) < _SEEN:
            return False
        if not self._steps:
            # Nothing is known of the step: it may begin where there is most room.
            return min(known) >= max(min(lengths) for lengths in self._gaps.values())
        left_ns = began_ns + min(known) - now_ns
        return left_ns >= self.margin * max(self._steps)

    def step_took(self, duration_ns: int) -> None:
        """A background step has ended."""
        self._ran = True
        if self._first_step:
            # It has allocated, compiled and loaded what the others find.
            self._first_step = False
            return
        self._steps.append(duration_ns)
