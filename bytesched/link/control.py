"""Rank 0's word and its plans in virtual time: who passes words on to whom, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bytesched.course import Course, Say
from bytesched.link.planned import planned_order
from bytesched.link.work import Work
from bytesched.policy import named_policy
from bytesched.tree import WORD_TASKS, children

__all__ = ["WORD_BYTES", "Control", "Planning", "Weather"]

#: one message of the leader: the number of tasks that it names, and their indices
WORD_BYTES = 8 * (1 + WORD_TASKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """How ranks learn the order that rank 0 has chosen.

    Ranks are a tree: each sends a word that it gets to ``fanout`` others, one after the other.
    """

    #: ranks - 1: rank 0 sends to all; 0: words need no message, and no time
    fanout: int
    #: CPU time of one send
    send_s: float
    #: on the way, and until it is read
    latency_s: float
    #: whether an order is planned, and replayed by all; saying it takes no time
    replay: bool = False
    #: whether rank 0 leads only now and then, while its order stays the same
    repeat: bool = False

    def children(self, rank: int, ranks: int) -> range:
        """The ranks to which ``rank`` sends what it gets."""
        if not self.fanout:
            return range(0)
        return children(rank, ranks, self.fanout)


@dataclass(frozen=True, slots=True)
class Weather:
    """What differs from one iteration to the next."""

    #: how many times as long each rank computes
    pace: tuple[float, ...]
    #: how many times as long the links take
    links: float = 1.0


class Planning:
    """The course of an iteration after the other, in which what all ranks say takes no time."""

    def __init__(self, work: Work, *, replay: bool, repeat: bool = False) -> None:
        self._work = work
        self.replay = replay and work.led
        self._course = Course(
            len(work.jobs), replay=self.replay, repeat=repeat and work.led and not self.replay
        )
        self._heard: Sequence[int] = ()

    @property
    def replayed(self) -> list[int] | None:
        """The order that all ranks replay or repeat, if they do."""
        return self._course.replayed

    def round_ends(self, order: Sequence[int], largest: Callable[[], Sequence[int]]) -> None:
        """An iteration is over, in which jobs have started in this order on rank 0.

        Args:
            largest: the numbers of `Measured`, the largest of all ranks; asked for when due.
        """
        work, course = self._work, self._course
        if course.is_led:
            course.named(order)
        say = course.round_ends(self._heard)
        if say is Say.NUMBERS:
            self._heard = largest()
        elif say is Say.PLAN:
            self._heard = planned_order(
                work.tasks(),
                self._heard,
                named_policy(work.policy),
                credit_bytes=work.credit_bytes,
            )
