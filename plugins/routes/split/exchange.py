"""The first phase of a sharded update over Gloo: chunks to their owners, as hops.

Gloo's own reduce-scatter takes as long as its all-reduce; exchanged by sends and receives, the
phase moves half of its bytes in half of its time. What is a hop of which chunk, `ChunkRoutes` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter_ns
from typing import Any, Final

import torch

from bytesched.busy import Busy
from bytesched.core import SchedulerCore
from bytesched.errors import BytesschedError, SchedulerClosed
from bytesched.lane import Lane
from bytesched.observe import Observers
from bytesched.order import Following, Leading
from bytesched.policy import Fifo
from bytesched.scheduler import EventThread, InTurn, Scheduler
from bytesched.task import CommTask
from bytesched.transport import Done
from bytesched.tunable import Setting

from ...layout.packing import Packer
from ...layout.plan import Plan
from ...proxies.spans import span
from ..carrier import Traffic
from ..groups.group import PATIENCE_S, Group
from ..groups.messages import Messages
from ..groups.waiters import Waiters
from .chunk_routes import (
    FROM_OWNER,
    TO_OWNER,
    ChunkRoutes,
    Lanes,
    Message,
    message_tag,
)
from .gathers import Gather, Gathers
from .learned import LearnedOrder
from .sums import Sums

__all__ = ["Exchange"]

#: Lane 0: chunks that are owned here.
_SUMS: Final = 0
#: Whatever is ready starts.
_NO_LIMIT: Final = 1 << 62
#: Rounds after which rank 0 tells all ranks the order in which it has submitted chunks.
_LEARNED_AFTER: Final = frozenset({1, 8})


class Exchange:
    """One rank's part in the hops of every chunk.

    An owner sums each chunk in the order of the ranks. The lanes to one rank share a link:
    gradients, in the one order in which all ranks send them, and sums of what no rank updates.

    Args:
        group: only this carrier uses it.
        plan: cut by owners.
        packer: of the plan.
        setting: its credit, as a multiple of its partition, is that of each lane.
        reduced: called when the route of a chunk has come to its end.
        summed: called after the last sum of a round that this rank owns.
        failed: called with the first error.
    """

    order = "exchange"

    def __init__(
        self,
        group: Group,
        plan: Plan,
        packer: Packer,
        setting: Setting,
        *,
        reduced: Callable[[CommTask], None],
        summed: Callable[[], None],
        failed: Callable[[BaseException], None],
        observers: Observers,
    ) -> None:
        self.group = group
        self.messages = Messages(group)
        self.peers = [rank for rank in range(group.size) if rank != group.rank]
        self._plan = plan
        self._packer = packer
        self._reduced = reduced
        self._tell_summed = summed
        self._observers = observers
        largest_bytes = max(chunk.nbytes for chunk in plan.chunks)
        ahead = max(setting.credit_bytes / setting.partition_bytes, 1.0) - 1.0
        #: of a lane to one rank
        self.credit_bytes = 1 + int(ahead * largest_bytes)
        #: the hops of every chunk
        self.routes = ChunkRoutes(plan, group.rank)
        #: of rank 0: as they were submitted in this round
        self._seen: list[int] = []
        self._rounds = 0
        #: of this round: chunks that were submitted, which the user's thread counts; before the
        #: first one, no rank waits for any
        self._submitted = len(plan.chunks)
        #: of this round: chunks whose sums are not here, and those whose routes have not ended
        self._unsummed = self._left = 0
        #: of each chunk, the hops to or from this rank that have not ended
        self._hops_left: list[int] = []
        self._started_ns: dict[int, int] = {}
        #: routes, and what else is on its way to or from this rank
        self.busy = Busy()
        self._chunks = self._nbytes = 0
        self._closed = False
        self._failed = failed
        self._gathers = Gathers(self.give_up)
        self._learned = LearnedOrder(group, self.messages, self.expect)
        self._sums = Sums(group, self.messages, packer, self.routes.owned, self._receive_to_sum)
        self._waiters = Waiters(self.messages, "bytesched-sends")
        self._submits = EventThread()
        core = SchedulerCore(Following(), credit_bytes=_NO_LIMIT)
        #: by lane, what begins its hops
        self._carriers: list[Callable[[CommTask, Done], None]] = [self._sums.start]
        #: by rank, the lanes of the first phase
        self.first_to: dict[int, tuple[Lane, Lane]] = {}
        self.scheduler = Scheduler(
            core,
            self,
            on_finish=self._ended,
            on_error=failed,
            # A message's end and the next one's start are one wake-up.
            events=InTurn(),
        )
        self._lanes = self._add_lanes()
        self.routes.lay(self._lanes, self._end_hop)

    def _add_lanes(self) -> Lanes:
        """Those to every other rank."""
        leaves, shares = {}, {}
        for peer in self.peers:
            leave = Lane(Following(), credit_bytes=self.credit_bytes, name=f"to {peer}")
            share = Lane(Leading(Fifo()), credit_bytes=self.credit_bytes, name=f"sums to {peer}")
            self.first_to[peer] = leave, share
            leaves[peer] = self.add_lane(leave, self._send_gradients)
            shares[peer] = self.add_lane(share, self._send_sum)
        return Lanes(_SUMS, leaves, shares)

    def add_lane(self, lane: Lane, begin: Callable[[CommTask, Done], None]) -> int:
        """One more lane, whose hops ``begin`` starts; returns its number."""
        self._carriers.append(begin)
        return self.scheduler.core.add_lane(lane)

    # -- the user's thread -------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.busy.total_ns, self._chunks, self._nbytes, self.scheduler.cpu_ns)

    @property
    def is_summed(self) -> bool:
        """Whether the sums of this round that this rank owns are in the arena."""
        return self._unsummed == 0

    def lost(self) -> BaseException | None:
        """The error of a message that is waited for and cannot come, if there is one."""
        return self.messages.lost()

    def begin_round(self) -> None:
        """A new backward pass begins, and nothing is under way. Raises an error of ours."""
        if (learned := self._learned.end()) is not None:
            self._use_order(learned)
        if self._rounds in _LEARNED_AFTER:
            self._learned.begin(self._seen or [chunk.index for chunk in self.routes.order])
        self._rounds += 1
        self._seen = []
        self._submitted = 0

    def _use_order(self, indices: list[int]) -> None:
        self.routes.use_order([self._plan.chunks[index] for index in indices])
        self._sums.use_order(self.routes.owned)

    def submit(self, chunk: CommTask) -> None:
        """The gradients of ``chunk``, which is READY, are there."""
        if self._closed:
            raise SchedulerClosed(f"{chunk!r} was submitted after close")
        now_ns = perf_counter_ns()
        if self._observers:
            self._observers.on_flow("s", chunk.index, "backward", now_ns)
        is_first = self._submitted == 0
        if is_first:
            # Nothing of the last round is under way.
            self._count_round()
            # Before this thread can expect parameters, which may come after these alone.
            if receives := self.routes.receives():
                self._gathers.begin(partial(self._receive_all, receives))
        self._submitted += 1
        self._seen.append(chunk.index)
        event = partial(self._submit, chunk, now_ns, first=is_first)
        # Not here: a hop that starts is packed, which would hold up backward.
        self._submits.put(self.scheduler.act, event)

    def expect(self, gathers: Iterable[Gather]) -> None:
        """Waits for these receives as well, front first."""
        self._gathers.add(gathers)

    def receive(self, memory: torch.Tensor, peer: int, chunk: CommTask, kind: int) -> Any:
        """Begins to receive what ``peer`` sends of ``chunk``; returns the work."""
        return self.group.receive(memory, peer, message_tag(chunk, kind))

    def send(self, memory: torch.Tensor, peer: int, hop: CommTask, tag: int, done: Done) -> None:
        """Begins to send ``memory``, which is ``hop``. Raises an error of ours."""
        try:
            with span("bytesched::send"):
                work = self.group.send(memory, peer, tag)
        except RuntimeError as error:
            raise self.group.error(error, task=hop.name) from error
        self._waiters.put(hop, work, peer, done)

    def story(self) -> str:
        core = self.scheduler.core
        return (
            f"  {self._submitted} of {len(self._plan.chunks)} chunks submitted, {self._unsummed} "
            f"to be summed here, {self._left} on their way\n{core!r}\n{core.story()}"
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and no rank waits for the rest of a round."""
        return self._submitted == len(self._plan.chunks) and not self._left

    def close(self, *, is_idle: bool = True) -> None:
        """Ends threads; what is under way fails. Idempotent.

        Args:
            is_idle: whether what shares the lanes of this has nothing under way.
        """
        if self._closed:
            return
        self._closed = True
        is_idle = is_idle and self.is_idle
        self._submits.close()
        self._waiters.stop()
        # First: what is under way ends because of this close, and not of a peer's.
        self.scheduler.close()
        if not is_idle:
            self.group.abort()
        self._sums.close()
        self._gathers.close()
        self._waiters.join()
        self._submits.join(PATIENCE_S)
        self._learned.close()

    # -- hops, see transport.Transport -------------------------------------------------

    def start(self, task: CommTask, done: Done) -> None:
        """Begins a hop, as its lane does."""
        self._carriers[task.lane](task, done)

    def _receive_to_sum(self, memory: torch.Tensor, rank: int, chunk: CommTask) -> Any:
        return self.receive(memory, rank, chunk, TO_OWNER)

    def _send_gradients(self, chunk: CommTask, done: Done) -> None:
        owner = self._plan.owners[chunk.index]
        self.send(self._packer.pack(chunk), owner, chunk, message_tag(chunk, TO_OWNER), done)

    def _send_sum(self, message: CommTask, done: Done) -> None:
        assert isinstance(message, Message)
        self.send(self._packer.memory(message.chunk), message.peer, message, message.tag, done)

    # -- events, one at a time ---------------------------------------------------------

    def _submit(self, chunk: CommTask, now_ns: int, *, first: bool) -> list[CommTask]:
        if first:
            self._begin_round()
        self._started_ns[chunk.index] = now_ns
        self.busy.begins(now_ns)
        return self.scheduler.core.ready(chunk)

    def _count_round(self) -> None:
        self._hops_left = list(self.routes.hops)
        self._unsummed = len(self.routes.owned)
        self._left = len(self._plan.chunks)

    def _begin_round(self) -> None:
        core = self.scheduler.core
        for peer, lane in self._lanes.leave.items():
            core.ordered(self.routes.leaving(peer), lane)
        core.ordered([chunk.index for chunk in self.routes.owned], _SUMS)
        self._sums.begin_round()

    def _ended(self, hop: CommTask) -> None:
        """A hop of this rank is over."""
        if isinstance(hop, Message):
            hop.ended(hop.chunk)
            return
        if hop.lane == _SUMS:
            self._unsummed -= 1
            if not self._unsummed:
                self._tell_summed()
        self._end_hop(hop)

    def _end_hop(self, chunk: CommTask) -> None:
        self._hops_left[chunk.index] -= 1
        if self._hops_left[chunk.index]:
            return
        now_ns = perf_counter_ns()
        self._packer.let_go(chunk)
        self._chunks += 1
        self._nbytes += chunk.nbytes
        began_ns = self._started_ns.pop(chunk.index)
        self.busy.ends(now_ns)
        self._left -= 1
        if self._observers:
            args = {"bytes": chunk.nbytes, "chunk": chunk.index}
            self._observers.on_span("send", chunk.name, began_ns, now_ns, args)
        self._reduced(chunk)

    # -- what comes from other owners --------------------------------------------------

    def _receive_all(self, chunks: Iterable[CommTask]) -> list[Gather]:
        # Owners send when they have all that this rank sends from the same memory.
        return [self._gather(chunk) for chunk in chunks]

    def _gather(self, chunk: CommTask) -> Gather:
        owner = self._plan.owners[chunk.index]
        work = self.receive(self._packer.memory(chunk), owner, chunk, FROM_OWNER)
        return partial(self._arrived, chunk, owner, work)

    def _arrived(self, chunk: CommTask, owner: int, work: Any) -> None:
        self.messages.wait(work, owner, task=chunk.name)
        self._packer.receive(chunk)
        self.scheduler.act(partial(self._end_arrival, chunk))

    def _end_arrival(self, chunk: CommTask) -> list[CommTask]:
        self._end_hop(chunk)
        return []

    def give_up(self, error: BaseException) -> None:
        """Something went wrong: it is reported as an error of ours. Any thread."""
        if not self._closed:
            is_ours = isinstance(error, BytesschedError) or not isinstance(error, RuntimeError)
            self._failed(error if is_ours else self.group.error(error))

    def __repr__(self) -> str:
        return f"<Exchange rank {self.group.rank} of {self.group.size}, {self.scheduler.core!r}>"
