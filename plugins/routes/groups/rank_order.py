"""One order on all ranks of torch.distributed: rank 0 leads, or all replay what it has planned."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Final

from bytesched.admission import Admission, Foreseen
from bytesched.course import Course, Say, is_repeated, is_replayed
from bytesched.link.planned import Measured, planned_order
from bytesched.order import Following, Leading, ReadyQueue
from bytesched.policy import Prophet, named_policy
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.tunable import Setting

from .group import Group
from .leader import Follower, Largest, Leader

__all__ = ["FollowingOrder", "LeadingOrder"]

#: Followers start what the leader's credit let through.
_NO_LIMIT: Final = 1 << 62


class _AgreedOrder:
    """What both sides have: the course of rounds, and what is measured (see scheduled.Ordering).

    Args:
        group: the control group.
        chunks: those of a round.
    """

    def __init__(self, group: Group, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._group = group
        self._largest = Largest(group)
        self._scheduler: Scheduler
        #: of the scheduler, when the last round ended
        self._busy_ns = 0
        self._begin(chunks, setting)

    def queue(self) -> ReadyQueue:
        return Following()

    @property
    def order(self) -> str:
        return "leader" if self._course.is_led else "replay"

    def round_ends(self) -> None:
        """It is decided how the next round is ordered, alike on all ranks."""
        scheduler, course = self._scheduler, self._course
        was_led = course.is_led
        if self._replays:
            self._measure()
        heard = self._largest.read()
        say = course.round_ends(heard)
        if say is Say.NUMBERS:
            self._largest.begin(self._measured.numbers())
        elif say is Say.PLAN:
            self._largest.begin(self._plan(heard))
        if course.is_led is not was_led:
            scheduler.core.use_queue(self.queue())
        if course.replayed is not None:
            scheduler.ordered(course.replayed)

    def _measure(self) -> None:
        scheduler = self._scheduler
        self._measured.round_ends(
            [scheduler.ready_at_ns[index] for index in range(len(self._chunks))],
            nbytes=self._nbytes,
            busy_ns=scheduler.busy_ns - self._busy_ns,
        )
        self._busy_ns = scheduler.busy_ns

    def _plan(self, numbers: Sequence[int]) -> list[int]:
        """What this rank says of the order to replay: nothing, which is less than any index."""
        return [-1] * len(self._chunks)

    def _begin(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._chunks = tuple(chunks)
        self._nbytes = sum(chunk.nbytes for chunk in chunks)
        self._setting = setting
        self._replays = is_replayed(setting.order, self._group.size)
        self._course = Course(
            len(chunks),
            replay=self._replays,
            repeat=is_repeated(setting.order, self._group.size),
        )
        self._measured = Measured()

    def _change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        """From the next round on rank 0 chooses, whatever was replayed before."""
        self._largest.read()
        self._begin(chunks, setting)
        self._busy_ns = self._scheduler.busy_ns
        # What was to be replayed next is still in the old queue.
        self._scheduler.use_queue(self.queue())


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
        return Foreseen(len(self._chunks), perf_counter) if is_foreseen else None

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

    def _plan(self, numbers: Sequence[int]) -> list[int]:
        setting = self._setting
        return planned_order(
            self._chunks, numbers, named_policy(setting.policy), credit_bytes=setting.credit_bytes
        )

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._change(chunks, setting)
        self._leader.change(self._course)

    def close(self) -> None:
        self._leader.close()
        self._largest.close()


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
            len(self._chunks),
            ordered=scheduler.ordered,
            on_error=scheduler.fail,
        )

    def ready(self) -> None:
        self._follower.chunk_ready()

    def announce(self, chunks: Sequence[CommTask]) -> None:
        pass

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._change(chunks, setting)
        self._follower.change(self._course, len(chunks))

    def close(self) -> None:
        self._follower.close()
        self._largest.close()
