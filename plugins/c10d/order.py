"""One order on all ranks of torch.distributed: rank 0 leads, or all replay what has settled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bytesched.config import Config
from bytesched.order import Following, Leading, ReadyQueue
from bytesched.plugins.c10d.group import Group
from bytesched.plugins.c10d.leader import Follower, Leader
from bytesched.policy import named_policy
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.tunable import Setting

__all__ = ["LedOrder", "replayed_orders"]

#: Followers start what the leader's credit let through.
_NO_LIMIT: Final = 1 << 62

#: Up to this many ranks the leader's messages are few; above, a settled order is replayed.
_LED_RANKS: Final = 8


def replayed_orders(ranks: int) -> frozenset[str]:
    """Those settings of the order, of `tunable.ORDERS`, with which a settled one is replayed."""
    return frozenset({"replay", "auto"} if ranks > _LED_RANKS else {"replay"})


class LedOrder:
    """This rank's part in the order (see peers.Agreement): rank 0 leads, the others follow.

    Args:
        group: the control group.
        chunks: how many there are in an iteration.
    """

    def __init__(self, group: Group, chunks: int, config: Config) -> None:
        self._group = group
        self._chunks = chunks
        self._policy = config.policy
        self._order = config.order
        self._scheduler: Scheduler
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._replays = False

    def queue(self) -> ReadyQueue:
        if self._group.rank or self._replays:
            return Following()
        return Leading(named_policy(self._policy))

    def window_bytes(self, credit_bytes: int) -> int:
        return _NO_LIMIT if self._group.rank else credit_bytes

    def bind(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        if self._group.rank:
            self._follower = Follower(
                self._group, self._chunks, ordered=scheduler.ordered, on_error=scheduler.fail
            )
            return
        self._leader = Leader(
            self._group,
            self._chunks,
            replay=self._may_replay(),
            blocked_ns=lambda: scheduler.blocked_ns,
        )

    def _may_replay(self) -> bool:
        return self._order in replayed_orders(self._group.size)

    def ready(self) -> None:
        if self._follower is not None:
            self._follower.chunk_ready()

    def announce(self, chunks: Sequence[CommTask]) -> None:
        if self._leader is not None:
            self._leader.announce(chunks)

    def round_ends(self) -> None:
        """Between two rounds the leader may change between choosing and replaying."""
        if self._leader is None:
            return
        replayed = self._leader.replayed
        if (replayed is not None) is not self._replays:
            self._replays = replayed is not None
            self._scheduler.core.use_queue(self.queue())
        if replayed is not None:
            self._scheduler.ordered(replayed)

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        """From the next round on rank 0 leads, whatever was replayed before."""
        self._chunks = len(chunks)
        self._policy, self._order = setting.policy, setting.order
        self._replays = False
        if self._leader is not None:
            self._leader.change(self._chunks, replay=self._may_replay())
        if self._follower is not None:
            self._follower.change(self._chunks)
        # What was to be replayed next is still in the old queue.
        self._scheduler.use_queue(self.queue())

    @property
    def order(self) -> str:
        """How the ranks agree at the moment: "leader" or "replay"."""
        side = self._leader or self._follower
        return "replay" if side is not None and side.replayed is not None else "leader"

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()
