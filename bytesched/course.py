"""How all ranks come to one order, round after round: led by rank 0, or replayed by all.

A state machine without messages, threads and clock, the same on every rank: of the same words and
numbers, all make the same of the next round.

| the round is | it ends, and | the next round is | is said then |
|---|---|---|---|
| led or replayed | nothing is due | as this one | nothing |
| led or replayed | numbers are due | as this one | what this rank has measured |
| led or replayed | the largest numbers of all ranks are heard | as this one | rank 0's plan |
| led or replayed | the plan is heard | replayed, as planned | nothing |
| led | it was like the ones before | replayed, as it was led | nothing |
| replayed, as it was led | it is the last of a few | led | nothing |

In a led round, rank 0 names tasks as it starts them, and all that is left in one word once nothing
else can become ready; the others pass words on and start the tasks in their order. Of a replayed
round nobody says anything: where every task finds the link idle, backward alone makes the order,
and what rank 0 would say is known. What is said when a round ends is heard when the next one does,
which no rank reaches before all have said it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from bytesched.errors import InvalidTransition

__all__ = [
    "LED_ROUNDS",
    "REPEATED_ROUNDS",
    "REPLAYED_FROM",
    "Course",
    "Say",
    "Words",
    "is_repeated",
    "is_replayed",
]

#: Rounds that are led before numbers are due, and that numbers are of.
LED_ROUNDS: Final = 5

#: Rounds of a first plan until numbers are due again. Each later plan has twice as many, at most
#: the second: what is planned settles.
_PLANNED_ROUNDS: Final = (16, 128)

#: Rounds in which an order that was led is repeated, before rank 0 leads again: few, as a graph or
#: a link that has changed is not noticed meanwhile.
REPEATED_ROUNDS: Final = 16

#: Ranks from which on `order = "auto"` is replayed.
REPLAYED_FROM: Final = 9


def is_replayed(order: str, ranks: int) -> bool:
    """Whether the setting ``order``, of `tunable.ORDERS`, is replayed among so many ranks."""
    return order == "replay" or (order == "auto" and ranks >= REPLAYED_FROM)


def is_repeated(order: str, ranks: int) -> bool:
    """Whether, under this setting and among so many ranks, an order that stays is not led again."""
    return order == "auto" and ranks < REPLAYED_FROM


class Say(Enum):
    """What all ranks say to each other when a round ends."""

    NOTHING = "nothing"
    #: what this rank has measured in the last rounds
    NUMBERS = "numbers"
    #: rank 0's plan, made of the largest numbers
    PLAN = "plan"


class Course:
    """Which rounds are led, and which are replayed in which order.

    Args:
        tasks: how many there are in a round.
        replay: whether an order is planned and replayed; else rank 0 leads.
        repeat: whether rank 0 leads only now and then, while its order stays the same.
    """

    def __init__(self, tasks: int, *, replay: bool, repeat: bool = False) -> None:
        self._tasks = tasks
        self._may_replay = replay
        self._may_repeat = repeat
        self._named: list[int] = []
        #: the order of the last led round, and how many in a row have had it
        self._order: list[int] = []
        self._alike = 0
        #: rounds until numbers are due, and how many there will be after the next plan
        self._left = LED_ROUNDS
        self._next = _PLANNED_ROUNDS[0]
        self._said = Say.NOTHING
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

    def round_ends(self, heard: Sequence[int] = ()) -> Say:
        """Every task of the round is over; what is to be said now.

        Args:
            heard: the plan, if that was said when the round before this one ended.

        Raises InvalidTransition if tasks of a led round were not named, or the plan is none.
        """
        if self.replayed is None and self.left:
            raise InvalidTransition(f"{self!r} ends early")
        named, self._named = self._named, []
        if self._may_repeat:
            self._repeat(named)
            return Say.NOTHING
        said, self._said = self._said, Say.NOTHING
        if said is Say.NUMBERS:
            self._said = Say.PLAN
        elif said is Say.PLAN:
            if sorted(heard) != list(range(self._tasks)):
                raise InvalidTransition(f"{self!r}: {list(heard)} is no order of its tasks")
            self.replayed = list(heard)
            self._left, self._next = self._next, min(2 * self._next, _PLANNED_ROUNDS[1])
        elif self._may_replay:
            self._left -= 1
            if not self._left:
                self._said = Say.NUMBERS
        return self._said

    def _repeat(self, named: list[int]) -> None:
        if self.replayed is not None:
            self._left -= 1
            if not self._left:
                self.replayed, self._alike = None, 0
            return
        self._alike = self._alike + 1 if named == self._order else 1
        self._order = named
        if self._alike == LED_ROUNDS:
            self.replayed, self._left = named, REPEATED_ROUNDS

    def __repr__(self) -> str:
        if self.replayed is not None:
            then = "rank 0 leads" if self._may_repeat else "numbers are due"
            return f"<Course replayed, {self._left} rounds until {then}>"
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
