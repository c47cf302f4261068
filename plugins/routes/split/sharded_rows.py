"""A sharded update by collectives: rows are summed, and later spread with new parameters.

Nobody leads: one lane carries what all ranks' scripts come to in one order, a round's sums as
backward completes them, and each step's parameters, front first. A hop waits for those before it
alone: an update needs the sums of an earlier round or of its own, never what comes after it. Before
rows of parameters are sent, the ranks compare which these are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from bytesched.core import SchedulerCore
from bytesched.errors import SchedulerClosed
from bytesched.observe import Observers
from bytesched.order import Following
from bytesched.scheduler import EventThread, InTurn, Scheduler
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ...layout.packing import Packer
from ...layout.plan import Plan
from ..carrier import Traffic
from ..groups.group import PATIENCE_S, Group
from ..streams import Streams
from .row_transport import ParameterHop, RowTransport
from .rows import RowCounts, RowHop, RowMemory, hops_of, rows_of
from .turns import Sent, Turns

__all__ = ["RowParameters", "ShardedRows"]


class ShardedRows:
    """The sums of rows, each for its owners (see exchange.Exchange).

    Args:
        group: only this carrier uses it.
        control: of Gloo, on which ranks compare what they send; only this carrier uses it.
        plan: cut by owners.
        packer: of the plan.
        reduced: called when the sums of a chunk have gone to their owner.
        summed: called after the last sum of a round.
        failed: called with the first error.
    """

    order = "rows"

    def __init__(
        self,
        group: Group,
        control: Group,
        plan: Plan,
        packer: Packer,
        setting: Setting,
        streams: Streams,
        *,
        reduced: Callable[[CommTask], None],
        summed: Callable[[], None],
        failed: Callable[[BaseException], None],
        observers: Observers,
    ) -> None:
        self.group = group
        self.rows = rows_of(plan, packer, group.size)
        self.memory = RowMemory()
        self._reduced = reduced
        self._tell_summed = summed
        self._closed = False
        sums, spreads = hops_of(self.rows)
        self._counts = RowCounts(self.rows, sums)
        self._order = [hop.index for hop in (*sums, *spreads)]
        #: no hop of a round has it, or a higher one
        self.free_index = 2 * len(self.rows)
        #: called with each hop that is over and is none of a round
        self.ended: Callable[[CommTask], None] = _nobody
        self._submits = EventThread()
        self.turns = Turns(control, failed)
        self.scheduler = Scheduler(
            SchedulerCore(Following(), credit_bytes=setting.credit_bytes),
            RowTransport(group, plan, packer, streams, self.memory),
            on_finish=self._ended,
            on_error=failed,
            observers=observers,
            events=InTurn(),
        )

    @property
    def traffic(self) -> Traffic:
        scheduler = self.scheduler
        return Traffic(
            scheduler.busy_ns, scheduler.tasks_started, scheduler.bytes_started, scheduler.cpu_ns
        )

    @property
    def is_summed(self) -> bool:
        """Whether the sums of this round that this rank owns are in the arena."""
        return self._counts.unsummed == 0

    def lost(self) -> BaseException | None:
        """Dead ranks are seen by answers and requests.

        A wait for a collective does not always: Gloo's reduce-scatter goes on past its limit.
        """
        return None

    def begin_round(self) -> None:
        """A new backward pass begins; its sums go after the parameters of all steps before it."""
        self._counts.begin_round()
        self.turns.begin_round(partial(self.scheduler.ordered, self._order))

    def submit(self, chunk: CommTask) -> None:
        """The gradients of ``chunk``, which is READY, are there."""
        if self._closed:
            raise SchedulerClosed(f"{chunk!r} was submitted after close")
        if (hop := self._counts.submitted(chunk)) is not None:
            # Not here: a hop that starts is packed, which would hold up backward.
            self._submits.put(self.scheduler.notify_ready, hop)

    def story(self) -> str:
        return f"{self._counts.story()}\n{self.scheduler.core.story()}"

    def close(self, *, is_idle: bool = True) -> None:
        """Ends threads; what is under way fails. Idempotent.

        Args:
            is_idle: whether no parameters are under way.
        """
        if self._closed:
            return
        self._closed = True
        self._submits.close()
        self.turns.close()
        is_idle = is_idle and self._counts.is_idle
        self._submits.join(PATIENCE_S)
        # First: what is under way ends because of this close, and not of a peer's.
        self.scheduler.close()
        if not is_idle:
            self.group.abort()
        self.memory.clear()

    def _ended(self, hop: CommTask) -> None:
        """Where the scheduler handles events."""
        assert isinstance(hop, RowHop)
        if hop.index >= self.free_index:
            self.ended(hop)
        elif hop.is_spread:
            self._counts.report(hop.row, self._reduced)
        else:
            if self._counts.summed():
                self._tell_summed()
            if not hop.followers:
                self._counts.report(hop.row, self._reduced)

    def __repr__(self) -> str:
        return f"<ShardedRows rank {self.group.rank} of {self.group.size}, {self.scheduler!r}>"


class RowParameters:
    """Spreads what owners have staged, a row at a time (see spreading.SpreadCarrier).

    Args:
        exchange: whose lane carries it.
        spread: called when what was sent of an owned chunk has left.
        gathered: called when a foreign chunk has come.
    """

    def __init__(
        self,
        exchange: ShardedRows,
        plan: Plan,
        streams: Streams,
        *,
        spread: Callable[[CommTask], None],
        gathered: Callable[[CommTask], None],
    ) -> None:
        self._exchange = exchange
        self._plan = plan
        self._streams = streams
        self._tell_spread = spread
        self._tell_gathered = gathered
        self._rows = {chunk.index: row for row in exchange.rows for chunk in row.present()}
        self._index = exchange.free_index
        #: guards what follows
        self._lock = threading.Lock()
        #: of turns that were armed and have no place in the order yet
        self._armed: list[ParameterHop] = []
        #: by turn and row, hops that are not over
        self._hops: dict[tuple[int, int], ParameterHop] = {}
        #: by turn and chunk: what is staged or on its way, and what makes a stream wait until it is
        #: memory that may be written to
        self._staged: dict[tuple[int, int], tuple[torch.Tensor, Callable[[], None]]] = {}
        self._closed = False
        exchange.ended = self._ended

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._hops

    def begin_round(self) -> None:
        """The exchange has put its sums behind all turns that were armed."""

    def arm(
        self, turn: int, leaving: Sequence[CommTask], coming: Mapping[CommTask, Sequence[slice]]
    ) -> None:
        """The next `spread` of this rank may be of ``turn``. The user's thread."""
        with self._lock:
            hops: dict[int, ParameterHop] = {}
            for chunk in (*leaving, *coming):
                row = self._rows[chunk.index]
                if row.number not in hops:
                    hop = ParameterHop(row, index=self._index, turn=turn)
                    self._index += 1
                    hops[row.number] = self._hops[turn, row.number] = hop
                if self._plan.owners[chunk.index] == self._exchange.group.rank:
                    hops[row.number].own = chunk
                else:
                    hops[row.number].foreign.append((chunk, coming[chunk]))
            self._armed += sorted(hops.values(), key=_front)

    def expect(self, chunks: Iterable[CommTask], sent: Sent) -> None:
        """What was armed has its place in the order: after all before it. The user's thread."""
        with self._lock:
            hops, self._armed = self._armed, []
        if hops:
            own = [hop.own.index for hop in hops if hop.own is not None]
            indices = [*own, *(chunk.index for hop in hops for chunk, _ in hop.foreign)]
            go = partial(self._exchange.scheduler.act, partial(self._order, hops))
            self._exchange.turns.agree(sent, indices, go)

    def stage(self, chunk: CommTask, turn: int) -> torch.Tensor:
        """The memory that `spread` sends in ``turn``."""
        row, buffer = self._rows[chunk.index], self._plan.buffers[chunk.index]
        with self._lock:
            if self._closed:
                raise SchedulerClosed(f"{chunk!r} was to be spread after an end")
            staged = self._staged.get((turn, chunk.index))
            if staged is None:
                memory = self._exchange.memory.take(buffer, row.length)
                self._staged[turn, chunk.index] = memory, self._streams.after_this()
            else:
                # New memory is filled with zeros on the stream that came first.
                memory, wait = staged
                wait()
            return memory[: buffer.numel()]

    def spread(self, chunk: CommTask, turn: int) -> None:
        """Sends what was staged of ``chunk``, in its turn."""
        with self._lock:
            hop = self._hops[turn, self._rows[chunk.index].number]
            hop.staged, _ = self._staged[turn, chunk.index]
        self._streams.staged(hop, self._begin)

    def close(self) -> None:
        """Nothing is staged any more. Idempotent."""
        with self._lock:
            self._closed = True

    # -- events, in the exchange's turn ------------------------------------------------

    def _begin(self, hop: CommTask) -> None:
        hop.notify_ready()
        self._exchange.scheduler.act(partial(self._exchange.scheduler.core.ready, hop))

    def _order(self, hops: Sequence[ParameterHop]) -> list[CommTask]:
        core = self._exchange.scheduler.core
        started = core.ordered([hop.index for hop in hops])
        for hop in hops:
            if hop.own is None:
                hop.notify_ready()
                started += core.ready(hop)
        return started

    def _ended(self, hop: CommTask) -> None:
        assert isinstance(hop, ParameterHop)
        with self._lock:
            del self._hops[hop.turn, hop.row.number]
            if hop.own is not None:
                del self._staged[hop.turn, hop.own.index]
        if hop.own is not None:
            self._tell_spread(hop.own)
        for chunk, _ in hop.foreign:
            self._tell_gathered(chunk)

    def __repr__(self) -> str:
        return f"<RowParameters {len(self._hops)} rows under way>"


def _front(hop: ParameterHop) -> int:
    """Where its row begins: the same on all ranks, whatever each owns of it."""
    return min(chunk.index for chunk in hop.row.present())


def _nobody(hop: CommTask) -> None:
    raise AssertionError(f"{hop!r} is of nobody")
