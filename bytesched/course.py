"""How all ranks keep to one order, round after round: backward's own, then one that is planned.

A state machine without messages, threads and clock, the same on every rank.

| a round ends, and | then | is said then |
|---|---|---|
| nothing is due | the order stays | nothing |
| numbers are due | the order stays | what each rank has measured |
| the largest numbers of all ranks are heard | the order stays | rank 0's plan, made of them |
| the plan is heard | it is the order | nothing |

What is said when a round ends is heard when the next one does, which no rank reaches before all
have said it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from bytesched.errors import InvalidTransition

__all__ = ["MEASURED_ROUNDS", "PLANNED_AFTER", "Course", "Say"]

#: Rounds before numbers are due, and that numbers are of.
MEASURED_ROUNDS: Final = 5

#: Rounds until a first plan is in force.
PLANNED_AFTER: Final = MEASURED_ROUNDS + 2

#: Rounds of a first plan until numbers are due again. Each later plan has twice as many, at most
#: the second: what is planned settles.
_PLANNED_ROUNDS: Final = (16, 128)


class Say(Enum):
    """What all ranks say to each other when a round ends."""

    NOTHING = "nothing"
    #: what this rank has measured in the last rounds
    NUMBERS = "numbers"
    #: rank 0's plan, made of the largest numbers
    PLAN = "plan"


class Course:
    """In which order the tasks of each round are issued on all ranks.

    Args:
        tasks: how many there are, numbered as the forward pass needs them.
    """

    def __init__(self, tasks: int) -> None:
        #: of the next round
        self.order = list(reversed(range(tasks)))
        #: rounds until numbers are due, and how many there will be after the next plan
        self._left = MEASURED_ROUNDS
        self._next = _PLANNED_ROUNDS[0]
        self._said = Say.NOTHING

    def round_ends(self, heard: Sequence[int] = ()) -> Say:
        """Every task of the round is over; what is to be said now.

        Args:
            heard: the plan, if that was said when the round before this one ended.

        Raises InvalidTransition if the plan is none.
        """
        said, self._said = self._said, Say.NOTHING
        if said is Say.NUMBERS:
            self._said = Say.PLAN
        elif said is Say.PLAN:
            self.follow(heard)
            self._left, self._next = self._next, min(2 * self._next, _PLANNED_ROUNDS[1])
        else:
            self._left -= 1
            if not self._left:
                self._said = Say.NUMBERS
        return self._said

    def follow(self, order: Sequence[int]) -> None:
        """The next round has this order. Raises InvalidTransition if it is none of its tasks."""
        if sorted(order) != list(range(len(self.order))):
            raise InvalidTransition(f"{self!r}: {list(order)} is no order of its tasks")
        self.order = list(order)

    def __repr__(self) -> str:
        return f"<Course of {self.order}, {self._left} rounds until numbers are due>"
