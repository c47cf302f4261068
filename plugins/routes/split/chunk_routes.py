"""The hops of every chunk of a split all-reduce, as one rank sees them; pure.

| route of a chunk | at its owner | on every other rank |
|---|---|---|
| split | sum, then spread to each rank | leave for the owner; the sum arrives |
| to be summed alone (a sharded update) | sum | leave for the owner |
| and told to who measures it | sum, then tell | leave; on that one rank, the sum arrives |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bytesched.task import CommTask

from ...layout.plan import Plan

__all__ = [
    "FROM_OWNER",
    "TO_MEASURER",
    "TO_OWNER",
    "ChunkRoutes",
    "Lanes",
    "Message",
    "message_tag",
]

#: what messages have: gradients, sums on their way to all ranks, and to one that measures them
TO_OWNER, FROM_OWNER, TO_MEASURER = range(3)


def message_tag(chunk: CommTask, kind: int) -> int:
    """Of the message of a kind that a chunk has between two ranks."""
    return 3 * chunk.index + kind


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
        kind: int,
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
        self.tag = message_tag(chunk, kind)
        self.ended = ended
        self.lane = lane
        self.index = index


@dataclass(frozen=True)
class Lanes:
    """The numbers of lanes: of sums here, and by rank of what is sent there."""

    sums: int
    #: gradients
    leave: Mapping[int, int]
    #: sums of the first phase
    share: Mapping[int, int]
    #: all other sums
    spread: Mapping[int, int]


class ChunkRoutes:
    """What this rank sends, sums and receives of every chunk in a round.

    Args:
        plan: cut by owners.
        rank: this one.
        is_spread: whether the sum of a chunk goes to all ranks at once.
        measurers: the rank that measures a chunk, by index, if that is not its owner.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        is_spread: Callable[[CommTask], bool],
        measurers: Mapping[int, int],
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._is_spread = is_spread
        self._measurers = measurers
        #: in which gradients are sent, the same on all ranks: as backward completes them, as far as
        #: that is known
        self.order: list[CommTask] = []
        self.owned: list[CommTask] = []
        self.foreign: list[CommTask] = []
        self.use_order(sorted(plan.chunks, key=plan.computed))
        #: that others own, and this rank is told of, where owners tell measurers
        self.told = [c for c in self.foreign if measurers.get(c.index) == rank]
        self._is_told = {chunk.index for chunk in self.told}
        #: by index: how a chunk that is owned here is told to who measures it
        self.telling: dict[int, Message] = {}
        #: of each chunk, the hops to and from this rank in a round
        self._hops = [1] * len(plan.chunks)

    @property
    def has_measurers(self) -> bool:
        """Whether any rank measures what others own; the same on all ranks."""
        return bool(self._measurers)

    def use_order(self, order: Sequence[CommTask]) -> None:
        """Another order, on all ranks."""
        owners = self._plan.owners
        self.order = list(order)
        self.owned = [c for c in order if owners[c.index] == self._rank]
        self.foreign = [c for c in order if owners[c.index] != self._rank]

    def lay(self, lanes: Lanes, ended: Callable[[CommTask], None]) -> None:
        """Gives every chunk its lane, and the hops that follow; ``ended`` is called after each."""
        for chunk in self.foreign:
            chunk.lane = lanes.leave[self._plan.owners[chunk.index]]
            self._hops[chunk.index] += self._is_spread(chunk)
        for chunk in self.owned:
            chunk.lane = lanes.sums
            if self._is_spread(chunk):
                to = lanes.share if chunk.index in self._plan.shared else lanes.spread
                chunk.followers = tuple(
                    self.message(chunk, peer, FROM_OWNER, lane, ended) for peer, lane in to.items()
                )
                self._hops[chunk.index] += len(to)
            elif (measurer := self._measurers.get(chunk.index)) is not None:
                self.telling[chunk.index] = self.message(
                    chunk, measurer, TO_MEASURER, lanes.share[measurer], ended
                )

    def message(
        self, chunk: CommTask, peer: int, kind: int, lane: int, ended: Callable[[CommTask], None]
    ) -> Message:
        """A hop of ``chunk``, which is owned here."""
        index = (1 + peer) * len(self._plan.chunks) + chunk.index
        return Message(chunk, peer, kind, lane=lane, index=index, ended=ended)

    def hops(self, *, tells: bool) -> list[int]:
        """Of each chunk, the hops to or from this rank in a round in which owners tell, or not."""
        hops = list(self._hops)
        if tells:
            for index in (*self.telling, *self._is_told):
                hops[index] += 1
        return hops

    def sums(self, *, tells: bool) -> int:
        """How many sums of a round this rank has to have before it can measure."""
        return len(self.owned) + tells * len(self.told)

    def is_told(self, chunks: Iterable[CommTask]) -> bool:
        """Whether this rank is told of those of ``chunks`` that others own."""
        owners = self._plan.owners
        foreign = [c for c in chunks if owners[c.index] != self._rank]
        return all(chunk.index in self._is_told for chunk in foreign)

    def leaving(self, owner: int) -> list[int]:
        """The indices of chunks that leave for a rank, in order."""
        return [c.index for c in self.foreign if self._plan.owners[c.index] == owner]

    def receives(self, *, tells: bool) -> list[tuple[CommTask, int]]:
        """The chunks of a round that come from other owners, and the kinds of their messages.

        First what a norm waits for, as it is computed; then the rest, front first.
        """
        shared = self._plan.shared
        spread = [chunk for chunk in self.foreign if self._is_spread(chunk)]
        soon = [(chunk, FROM_OWNER) for chunk in spread if chunk.index in shared]
        soon += [(chunk, TO_MEASURER) for chunk in self.told] if tells else []
        late = [(chunk, FROM_OWNER) for chunk in spread if chunk.index not in shared]
        return [
            *sorted(soon, key=lambda pair: self._plan.computed(pair[0])),
            *sorted(late, key=lambda pair: pair[0].index),
        ]

    def __repr__(self) -> str:
        return (
            f"<ChunkRoutes rank {self._rank}: {len(self.owned)} owned, {len(self.foreign)} leave, "
            f"{len(self.telling)} to tell, {len(self.told)} told>"
        )
