"""One order on all ranks of torch.distributed: rank 0 leads, or all replay what has converged."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Final

from bytesched.admission import Admission, Foreseen
from bytesched.order import Following, Leading, ReadyQueue
from bytesched.plugins.c10d.group import Group
from bytesched.plugins.c10d.leader import Follower, Leader
from bytesched.policy import Prophet, named_policy
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.tunable import Setting

__all__ = ["FollowingOrder", "LeadingOrder", "replayed_orders"]

#: Followers start what the leader's credit let through.
_NO_LIMIT: Final = 1 << 62

#: Up to this many ranks the leader's messages are few; above, an order that converged is replayed.
_LED_RANKS: Final = 8


def replayed_orders(ranks: int) -> frozenset[str]:
    """Settings of the order, of `tunable.ORDERS`, with which one that converged is replayed."""
    return frozenset({"replay", "auto"} if ranks > _LED_RANKS else {"replay"})


class LeadingOrder:
    """Rank 0 chooses by policy, and the others follow; what has converged is replayed by all.

    See scheduled.Ordering.

    Args:
        group: the control group.
        chunks: how many there are in a round.
    """

    def __init__(self, group: Group, chunks: int, setting: Setting) -> None:
        self._group = group
        self._chunks = chunks
        self._setting = setting
        self._replays = False
        self._scheduler: Scheduler
        self._leader: Leader

    def queue(self) -> ReadyQueue:
        return Following() if self._replays else Leading(named_policy(self._setting.policy))

    def window_bytes(self, credit_bytes: int) -> int:
        return credit_bytes

    def admission(self) -> Admission | None:
        is_foreseen = isinstance(named_policy(self._setting.policy), Prophet)
        return Foreseen(self._chunks, perf_counter) if is_foreseen else None

    def bind(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._leader = Leader(
            self._group,
            self._chunks,
            replay=self._may_replay(),
            blocked_ns=lambda: scheduler.blocked_ns,
        )

    def ready(self) -> None:
        pass

    def announce(self, chunks: Sequence[CommTask]) -> None:
        self._leader.announce(chunks)

    def round_ends(self) -> None:
        """Between two rounds the leader may change between choosing and replaying."""
        replayed = self._leader.replayed
        if (replayed is not None) is not self._replays:
            self._replays = replayed is not None
            self._scheduler.core.use_queue(self.queue())
        if replayed is not None:
            self._scheduler.ordered(replayed)

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        """From the next round on rank 0 chooses, whatever was replayed before."""
        self._chunks = len(chunks)
        self._setting = setting
        self._replays = False
        self._leader.change(self._chunks, replay=self._may_replay())
        # What was to be replayed next is still in the old queue.
        self._scheduler.use_queue(self.queue())

    @property
    def order(self) -> str:
        return _order(self._leader)

    def close(self) -> None:
        self._leader.close()

    def _may_replay(self) -> bool:
        return self._setting.order in replayed_orders(self._group.size)


class FollowingOrder:
    """The order that rank 0 has chosen, or the one that all replay (see scheduled.Ordering).

    Args:
        group: the control group.
        chunks: how many there are in a round.
    """

    def __init__(self, group: Group, chunks: int) -> None:
        self._group = group
        self._chunks = chunks
        self._scheduler: Scheduler
        self._follower: Follower

    def queue(self) -> ReadyQueue:
        return Following()

    def window_bytes(self, credit_bytes: int) -> int:
        return _NO_LIMIT

    def admission(self) -> None:
        return None

    def bind(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._follower = Follower(
            self._group, self._chunks, ordered=scheduler.ordered, on_error=scheduler.fail
        )

    def ready(self) -> None:
        self._follower.chunk_ready()

    def announce(self, chunks: Sequence[CommTask]) -> None:
        pass

    def round_ends(self) -> None:
        pass

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._follower.change(len(chunks))
        self._scheduler.use_queue(self.queue())

    @property
    def order(self) -> str:
        return _order(self._follower)

    def close(self) -> None:
        self._follower.close()


def _order(side: Leader | Follower) -> str:
    return "leader" if side.replayed is None else "replay"
