"""The hops of every chunk of a sharded update, as one rank sees them; pure.

| route of a chunk | at its owner | on every other rank |
|---|---|---|
| that one rank updates | sum | leave for the owner |
| that no optimizer has | sum, then spread to each rank | leave for the owner; the sum arrives |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bytesched.task import CommTask

from ...layout.plan import Plan

__all__ = [
    "FROM_OWNER",
    "TO_OWNER",
    "ChunkRoutes",
    "Lanes",
    "Message",
    "message_tag",
]

#: what messages have: gradients, and what an owner sends to all ranks
TO_OWNER, FROM_OWNER = range(2)


def message_tag(chunk: CommTask, kind: int) -> int:
    """Of the message of a kind that a chunk has between two ranks."""
    return 2 * chunk.index + kind


class Message(CommTask):
    """A hop: what this rank sends of a chunk that it owns, to one other rank.

    Args:
        index: of no other hop of the exchange.
        ended: called with the chunk when the message has left, in the scheduler's turn.
    """

    __slots__ = ("chunk", "ended", "peer", "tag")

    def __init__(
        self,
        chunk: CommTask,
        peer: int,
        *,
        lane: int,
        index: int,
        ended: Callable[[CommTask], None],
    ) -> None:
        super().__init__(
            f"{chunk.name} to {peer}",
            start_at=chunk.start_at,
            stop_at=chunk.stop_at,
            itemsize=chunk.itemsize,
            priority=chunk.priority,
        )
        self.chunk = chunk
        self.peer = peer
        self.tag = message_tag(chunk, FROM_OWNER)
        self.ended = ended
        self.lane = lane
        self.index = index


@dataclass(frozen=True)
class Lanes:
    """The numbers of lanes: of sums here, and by rank of what is sent there."""

    sums: int
    #: gradients
    leave: Mapping[int, int]
    #: sums
    share: Mapping[int, int]


class ChunkRoutes:
    """What this rank sends, sums and receives of every chunk in a round.

    Args:
        plan: cut by owners.
        rank: this one.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        #: in which gradients are sent, the same on all ranks: as backward completes them, as far as
        #: that is known
        self.order: list[CommTask] = []
        self.owned: list[CommTask] = []
        self.foreign: list[CommTask] = []
        self.use_order(sorted(plan.chunks, key=plan.computed))
        #: of each chunk, the hops to and from this rank in a round
        self.hops = [1] * len(plan.chunks)

    def use_order(self, order: Sequence[CommTask]) -> None:
        """Another order, on all ranks."""
        owners = self._plan.owners
        self.order = list(order)
        self.owned = [c for c in order if owners[c.index] == self._rank]
        self.foreign = [c for c in order if owners[c.index] != self._rank]

    def lay(self, lanes: Lanes, ended: Callable[[CommTask], None]) -> None:
        """Gives every chunk its lane, and the hops that follow; ``ended`` is called after each."""
        shared = self._plan.shared
        for chunk in self.foreign:
            chunk.lane = lanes.leave[self._plan.owners[chunk.index]]
            self.hops[chunk.index] += chunk.index in shared
        for chunk in self.owned:
            chunk.lane = lanes.sums
            if chunk.index in shared:
                chunk.followers = tuple(
                    self.message(chunk, peer, lane, ended) for peer, lane in lanes.share.items()
                )
                self.hops[chunk.index] += len(lanes.share)

    def message(
        self, chunk: CommTask, peer: int, lane: int, ended: Callable[[CommTask], None]
    ) -> Message:
        """A hop of ``chunk``, which is owned here."""
        index = (1 + peer) * len(self._plan.chunks) + chunk.index
        return Message(chunk, peer, lane=lane, index=index, ended=ended)

    def leaving(self, owner: int) -> list[int]:
        """The indices of chunks that leave for a rank, in order."""
        return [c.index for c in self.foreign if self._plan.owners[c.index] == owner]

    def receives(self) -> list[CommTask]:
        """The chunks of a round whose sums come from other owners, as they are computed."""
        shared = [chunk for chunk in self.foreign if chunk.index in self._plan.shared]
        return sorted(shared, key=self._plan.computed)

    def __repr__(self) -> str:
        return (
            f"<ChunkRoutes rank {self._rank}: {len(self.owned)} owned, {len(self.foreign)} leave>"
        )
