"""One order on all ranks of torch.distributed: rank 0 leads, or all replay what has converged."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Final

from bytesched.admission import Admission, Foreseen
from bytesched.course import Course, Drift
from bytesched.order import Following, Leading, ReadyQueue
from bytesched.plugins.c10d.group import Group
from bytesched.plugins.c10d.leader import Follower, Leader, Votes
from bytesched.policy import Prophet, named_policy
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.tunable import Setting

__all__ = ["REPLAYED_ORDERS", "FollowingOrder", "LeadingOrder"]

#: Followers start what the leader's credit let through.
_NO_LIMIT: Final = 1 << 62

#: Settings of the order, of `tunable.ORDERS`, with which one that converged is replayed.
REPLAYED_ORDERS: Final = frozenset({"replay"})


class _AgreedOrder:
    """What both sides have: the course of rounds, and votes (see scheduled.Ordering).

    Args:
        group: the control group.
        chunks: how many there are in a round.
    """

    def __init__(self, group: Group, chunks: int, setting: Setting) -> None:
        self._group = group
        self._chunks = chunks
        self._setting = setting
        self._course = self._new_course()
        self._drift = Drift()
        self._votes = Votes(group)
        self._scheduler: Scheduler

    def queue(self) -> ReadyQueue:
        return Following()

    @property
    def order(self) -> str:
        return "leader" if self._course.is_led else "replay"

    def round_ends(self) -> None:
        """It is decided how the next round is ordered, alike on all ranks."""
        scheduler, course = self._scheduler, self._course
        was_led = course.is_led
        if not was_led:
            self._drift.round_ends(scheduler.blocked_ns)
        if course.round_ends(votes=self._votes.count()):
            self._votes.cast(against=self._drift.seen)
        if course.is_led is not was_led:
            self._drift.begins(scheduler.blocked_ns)
            scheduler.core.use_queue(self.queue())
        if course.replayed is not None:
            scheduler.ordered(course.replayed)

    def _change(self, chunks: int, setting: Setting) -> None:
        """From the next round on rank 0 chooses, whatever was replayed before."""
        self._votes.count()
        self._chunks = chunks
        self._setting = setting
        self._course = self._new_course()
        # What was to be replayed next is still in the old queue.
        self._scheduler.use_queue(self.queue())

    def _new_course(self) -> Course:
        replay = self._setting.order in REPLAYED_ORDERS
        return Course(self._chunks, replay=replay)


class LeadingOrder(_AgreedOrder):
    """Rank 0's side: it chooses by policy, and the others follow."""

    def queue(self) -> ReadyQueue:
        if not self._course.is_led:
            return Following()
        self._queue = Leading(named_policy(self._setting.policy))
        return self._queue

    def window_bytes(self, credit_bytes: int) -> int:
        return credit_bytes

    def admission(self) -> Admission | None:
        is_foreseen = isinstance(named_policy(self._setting.policy), Prophet)
        return Foreseen(self._chunks, perf_counter) if is_foreseen else None

    def bind(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._leader = Leader(self._group, self._course)

    def ready(self) -> None:
        pass

    def announce(self, chunks: Sequence[CommTask]) -> None:
        if self._course.is_led:
            self._leader.announce(chunks, self._queue.waiting())

    def round_ends(self) -> None:
        if self._course.is_led:
            self._leader.round_ends()
        super().round_ends()

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._change(len(chunks), setting)
        self._leader.change(self._course)

    def close(self) -> None:
        self._leader.close()
        self._votes.close()


class FollowingOrder(_AgreedOrder):
    """The other ranks' side: they start what rank 0 has named, or what all replay."""

    def window_bytes(self, credit_bytes: int) -> int:
        return _NO_LIMIT

    def admission(self) -> None:
        return None

    def bind(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._follower = Follower(
            self._group,
            self._course,
            self._chunks,
            ordered=scheduler.ordered,
            on_error=scheduler.fail,
        )

    def ready(self) -> None:
        self._follower.chunk_ready()

    def announce(self, chunks: Sequence[CommTask]) -> None:
        pass

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._change(len(chunks), setting)
        self._follower.change(self._course, self._chunks)

    def close(self) -> None:
        self._follower.close()
        self._votes.close()
