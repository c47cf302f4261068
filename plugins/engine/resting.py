"""When a session rests: both ways of a round are measured, and again now and then.

A session that rests leaves gradients and steps to the framework. Every rank sees the same numbers,
those of all ranks, in the same round, and comes to the same decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

__all__ = ["HIDDEN", "LONGEST", "LOOK", "MEASURED", "SHORTEST", "Alternation", "Report"]

#: rounds at the beginning of a stretch that are not measured: memory is laid out anew, and in the
#: first stretch the ranks vote on splitting
_SETTLING: Final = 3
#: the last rounds of a stretch, which are
MEASURED: Final = 8
#: rounds of a stretch in which the other way is only looked at
LOOK: Final = _SETTLING + MEASURED
#: rounds of any other stretch: at first, and after it has won again and again
SHORTEST, LONGEST = 64, 512

#: What of communication can be seen, as a share of an iteration, is what scheduling might hide and
#: the framework would not. From here on nobody rests, not even to see what that would bring.
HIDDEN: Final = 0.05


class Report(NamedTuple):
    """What one rank has measured in a stretch, in microseconds."""

    may_rest: bool
    #: the median
    iteration: int
    #: for each of the measured rounds, from the end of backward until the last gradient was there
    exposed: tuple[int, ...]

    def numbers(self) -> list[int]:
        """The report as whole numbers, `MEASURED` + 2 of them."""
        return [int(self.may_rest), self.iteration, *self.exposed]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Report:
        """The report that ``numbers`` were made of."""
        may_rest, iteration, *exposed = numbers
        return cls(bool(may_rest), iteration, tuple(exposed))


class Alternation:
    """Stretches of rounds that are scheduled and of rounds that are rested, the faster way longer.

    At the end of a stretch every rank reports, and all decide. Where communication hides, the other
    way is looked at, for a few rounds; then the faster one has a long stretch, twice as long as its
    last one if it has won again. Where it does not hide, rounds are scheduled.
    """

    def __init__(self) -> None:
        self.is_resting = False
        #: the stretch is a short one
        self.is_look = True
        self._left = LOOK
        self._iterations: deque[int] = deque(maxlen=MEASURED)
        self._exposed: deque[int] = deque(maxlen=MEASURED)
        #: an iteration of the stretch before, if it was of the other way
        self._other = 0
        #: the last long stretch, and whether it was rested
        self._longest = 0
        self._rest_won = False

    def round_over(self, iteration_us: int, exposed_us: int) -> None:
        """A round of the stretch is over.

        Args:
            exposed_us: from the end of its backward pass until its last gradient was there.
        """
        self._iterations.append(iteration_us)
        self._exposed.append(exposed_us)
        self._left -= 1

    @property
    def is_over(self) -> bool:
        """Whether the stretch is: it goes on until the ranks have decided."""
        return self._left <= 0

    def report(self, *, may_rest: bool) -> Report:
        """Of this rank, at the end of a stretch."""
        return Report(may_rest, int(median(self._iterations)), tuple(self._exposed))

    def decide(self, reports: Sequence[Report]) -> None:
        """Begins the next stretch, after the reports of all ranks on the last one."""
        iteration = max(report.iteration for report in reports)
        if not all(report.may_rest for report in reports):
            self._schedule()
        elif self.is_resting and not self.is_look:
            self._look(iteration)
        elif self.is_resting:
            self._judge(scheduled=self._other, rested=iteration)
        elif _exposed(reports) > HIDDEN * iteration:
            self._schedule()
        elif self.is_look and self._other:
            self._judge(scheduled=iteration, rested=self._other)
        else:
            self._look(iteration)

    def _schedule(self) -> None:
        self._longest = 0
        self._begin(resting=False, rounds=SHORTEST)

    def _look(self, iteration: int) -> None:
        self._begin(resting=not self.is_resting, rounds=LOOK)
        self.is_look, self._other = True, iteration

    def _judge(self, *, scheduled: int, rested: int) -> None:
        rest_wins = rested <= scheduled
        if not self._longest or rest_wins is not self._rest_won:
            self._longest = SHORTEST
        else:
            self._longest = min(2 * self._longest, LONGEST)
        self._rest_won = rest_wins
        self._begin(resting=rest_wins, rounds=self._longest)

    def _begin(self, *, resting: bool, rounds: int) -> None:
        self.is_resting, self.is_look = resting, False
        self._left, self._other = rounds, 0
        self._iterations.clear()
        self._exposed.clear()

    def __repr__(self) -> str:
        way = "resting" if self.is_resting else "scheduled"
        return f"<Alternation {way} for {max(self._left, 0)} more rounds>"


def _exposed(reports: Sequence[Report]) -> float:
    """For how long nothing but communication kept all ranks from going on: the median round.

    The last rank to end its backward pass waits for that alone, the others for that rank as well.
    """
    rounds = zip(*(report.exposed for report in reports), strict=True)
    return float(median(map(min, rounds)))
