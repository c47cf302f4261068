"""How all ranks come to one order, round after round: led by rank 0, or replayed by all.

A state machine without messages, threads and clock, the same on every rank: of the same words and
votes, all make the same of the next round.

| the round is | event | the next round is |
|---|---|---|
| led | ends, and its orders have not converged | led |
| led | ends, and they have | replayed |
| replayed | ends | replayed |
| replayed | ends, and the votes that came in say that the order has stopped to fit | led |

In a led round, rank 0 names tasks as it starts them, and all that is left in one word once nothing
else can become ready; the others pass words on and start the tasks in their order. Of a replayed
round nobody says anything. Every `VOTES_EVERY` replayed rounds the ranks vote: the vote is cast
when a round ends and counted when the next one does, which no rank reaches before all have voted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bytesched.errors import InvalidTransition
from bytesched.order import OrderLearner

__all__ = ["VOTES_EVERY", "Course", "Drift", "Words"]

VOTES_EVERY: Final = 16

#: An order has stopped to fit where its head is late by this much for so many rounds.
_LATE_NS: Final = 5_000_000
_LATE_ROUNDS: Final = 3


class Course:
    """Which rounds are led and which are replayed.

    Args:
        tasks: how many there are in a round.
        replay: whether an order that has converged may be replayed.
    """

    def __init__(self, tasks: int, *, replay: bool) -> None:
        self._tasks = tasks
        self._may_replay = replay
        self._named: list[int] = []
        self._rounds_replayed = 0
        self._learner = OrderLearner()
        #: the order that this round replays; None if it is led
        self.replayed: list[int] | None = None

    @property
    def is_led(self) -> bool:
        """Whether rank 0 leads this round."""
        return self.replayed is None

    @property
    def left(self) -> int:
        """Tasks of this round that rank 0 has not named."""
        return self._tasks - len(self._named)

    def named(self, indices: Sequence[int]) -> None:
        """Rank 0 has named the next tasks, here or in a word. Raises InvalidTransition."""
        if self.replayed is not None or len(indices) > self.left:
            raise InvalidTransition(f"{self!r} has no place for {list(indices)}")
        self._named += indices

    def round_ends(self, *, votes: int = 0) -> bool:
        """Every task of the round is over; whether this rank has to vote now.

        Args:
            votes: of the ranks that found, in the round before this one, that the order does not
                fit; 0 where there was no vote.

        Raises InvalidTransition if tasks of a led round were not named.
        """
        if self.replayed is None:
            if self.left:
                raise InvalidTransition(f"{self!r} ends early")
            if self._may_replay:
                self._learner.observe(self._named)
                self.replayed = self._learner.converged()
            self._named = []
            self._rounds_replayed = 0
            return False
        if votes:
            self.replayed = None
            self._learner = OrderLearner()
            return False
        self._rounds_replayed += 1
        return self._rounds_replayed % VOTES_EVERY == 0

    def __repr__(self) -> str:
        if self.replayed is not None:
            return f"<Course replayed for {self._rounds_replayed} rounds>"
        return f"<Course led, {len(self._named)} of {self._tasks} tasks named>"


class Words:
    """What rank 0 says of the tasks that it starts in a led round."""

    def __init__(self, course: Course) -> None:
        self._course = course
        #: tasks that were named before they start, in that order
        self._ahead: list[int] = []

    def started(self, indices: Sequence[int], waiting: Sequence[int]) -> list[int]:
        """The tasks to name now, before those of ``indices`` start; none if all know them.

        Args:
            waiting: the others that are ready, in the order in which they would start.

        Raises InvalidTransition if tasks that were named ahead start in another order.
        """
        if self._ahead:
            ahead, self._ahead = self._ahead[: len(indices)], self._ahead[len(indices) :]
            if ahead != list(indices):
                raise InvalidTransition(f"{list(indices)} start, but {ahead} were named")
            return []
        # Where nothing else can become ready, the policy has spoken its last word.
        is_rest = len(indices) + len(waiting) == self._course.left
        self._ahead = list(waiting) if is_rest else []
        word = [*indices, *self._ahead]
        self._course.named(word)
        return word


class Drift:
    """Whether a replayed order has stopped to fit here: its head is late, round after round."""

    def __init__(self) -> None:
        self._before_ns = 0
        self._late_rounds = 0

    def begins(self, blocked_ns: int) -> None:
        """An order begins to be replayed."""
        self._before_ns, self._late_rounds = blocked_ns, 0

    def round_ends(self, blocked_ns: int) -> None:
        """A replayed round is over.

        Args:
            blocked_ns: for how long, in all, nothing was on the wire because the head of the
                order was not ready while other tasks were.
        """
        late = blocked_ns - self._before_ns > _LATE_NS
        self._before_ns = blocked_ns
        self._late_rounds = self._late_rounds + 1 if late else 0

    @property
    def seen(self) -> bool:
        """Whether it was late in each of the last rounds."""
        return self._late_rounds >= _LATE_ROUNDS
