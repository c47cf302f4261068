"""The split all-reduce by collectives: rows are summed by reduce-scatter, spread by all-gather.

NCCL wants all ranks to issue the operations of a communicator in one order. So both hops of every
row are tasks of one lane, whose order rank 0 leads: sums that a norm waits for go first, then rows
that all ranks sum, then all others, front first. A row's spread is ready when its sum has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from bytesched.course import is_replayed
from bytesched.errors import SchedulerClosed
from bytesched.observe import Observers
from bytesched.scheduler import InTurn
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ...layout.packing import Packer
from ...layout.plan import Plan
from ..carrier import Traffic
from ..groups.group import Group
from ..groups.rank_order import FollowingOrder, LeadingOrder
from ..scheduled import ScheduledCarrier
from ..streams import Streams
from .row_transport import RowTransport
from .rows import Row, RowHop, RowMemory, rows_of

__all__ = ["RowCounts", "RowExchange", "hops_of"]


def hops_of(rows: Sequence[Row], plan: Plan) -> tuple[list[RowHop], list[RowHop]]:
    """The sums of all rows, and their spreads; each spread follows its sum."""
    count, chunks = len(rows), len(plan.chunks)
    sums, spreads = [], []
    for row in rows:
        front = min(chunk.index for chunk in row.present())
        behind = count if row.is_shared else count + chunks
        sums.append(RowHop(row, index=row.number, priority=row.number, is_spread=False))
        spreads.append(
            RowHop(row, index=count + row.number, priority=behind + front, is_spread=True)
        )
        sums[-1].members = tuple(row.present())
        sums[-1].missing = len(sums[-1].members)
    return sums, spreads


class RowCounts:
    """Which chunks of a round have come, and which rows are summed."""

    def __init__(self, rows: Sequence[Row], sums: Sequence[RowHop]) -> None:
        self._sum_of = {
            chunk.index: hop for row, hop in zip(rows, sums, strict=True) for chunk in row.present()
        }
        self._rows = len(rows)
        #: of this round: chunks that were not submitted, rows that are not summed, and chunks that
        #: were not reported
        self.unsubmitted = self.unsummed = self.unreported = 0

    def begin_round(self) -> None:
        """Every chunk comes once more; none is under way."""
        self.unsubmitted = self.unreported = len(self._sum_of)
        self.unsummed = self._rows

    def submitted(self, chunk: CommTask) -> RowHop | None:
        """The sum that can begin now, if ``chunk`` was the last one of its row."""
        self.unsubmitted -= 1
        hop = self._sum_of[chunk.index]
        return hop if hop.notify_ready() else None

    def summed(self) -> bool:
        """One more row is; whether that was the last one."""
        self.unsummed -= 1
        return not self.unsummed

    def report(self, row: Row, reduced: Callable[[CommTask], None]) -> None:
        """The chunks of ``row`` are reduced, and wait for gradients again."""
        for chunk in row.present():
            chunk.start()
            chunk.notify_finish()
            chunk.rearm()
            self.unreported -= 1
            reduced(chunk)

    @property
    def is_idle(self) -> bool:
        """Whether no other rank waits for the rest of a round."""
        # Before its first chunk, nobody waits for any.
        begun = self.unsubmitted < len(self._sum_of)
        return not (begun and (self.unsubmitted or self.unreported))

    def story(self) -> str:
        """For the message of an error."""
        chunks = len(self._sum_of)
        return (
            f"  {chunks - self.unsubmitted} of {chunks} chunks submitted, {self.unsummed} of "
            f"{self._rows} rows to be summed, {self.unreported} chunks on their way"
        )


class _FollowedInTwoHops(FollowingOrder):
    """With each sum that is ready here, a spread will be."""

    def ready(self) -> None:
        super().ready()
        super().ready()


class RowExchange:
    """One rank's part in both hops of every row (see exchange.Exchange).

    Args:
        group: only this carrier uses it.
        control: the group that the leader's order travels on; only this carrier uses it.
        plan: cut by owners.
        packer: of the plan.
        reduced: called when a chunk is reduced.
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
        self._reduced = reduced
        self._tell_summed = summed
        self._closed = False
        rows = rows_of(plan, packer, group.size)
        sums, spreads = hops_of(rows, plan)
        for hop, follower in zip(sums, spreads, strict=True):
            hop.followers = (follower,)
        hops = [*sums, *spreads]
        self._counts = RowCounts(rows, sums)
        # A plan is made of when gradients are ready, and knows nothing of two hops.
        order = "leader" if is_replayed(setting.order, group.size) else setting.order
        setting = dataclasses.replace(setting, policy="priority", order=order)
        ordering = (LeadingOrder if group.rank == 0 else _FollowedInTwoHops)(control, hops, setting)
        self._carrier = ScheduledCarrier(
            hops,
            RowTransport(group, plan, packer, streams, RowMemory()),
            ordering,
            credit_bytes=setting.credit_bytes,
            reduced=self._ended,
            failed=failed,
            observers=observers,
            events=InTurn(),
        )

    @property
    def traffic(self) -> Traffic:
        return self._carrier.traffic

    @property
    def is_summed(self) -> bool:
        """Whether the sums of this round that this rank owns are in the arena."""
        return self._counts.unsummed == 0

    def lost(self) -> BaseException | None:
        """Dead ranks are seen by answers: Gloo's reduce-scatter waits past any limit of a wait."""
        return None

    def begin_round(self) -> None:
        """A new backward pass begins, and nothing is under way."""
        self._counts.begin_round()

    def submit(self, chunk: CommTask) -> None:
        """The gradients of ``chunk``, which is READY, are there."""
        if self._closed:
            raise SchedulerClosed(f"{chunk!r} was submitted after close")
        if (hop := self._counts.submitted(chunk)) is not None:
            self._carrier.submit(hop)

    def story(self) -> str:
        return f"{self._counts.story()}\n{self._carrier.story()}"

    def close(self) -> None:
        """Ends threads; what is under way fails. Idempotent."""
        if self._closed:
            return
        self._closed = True
        is_idle = self._counts.is_idle
        # First: what is under way ends because of this close, and not of a peer's.
        self._carrier.stop()
        if not is_idle:
            # Before the order is closed, which may wait for ranks that wait for this one.
            self.group.abort()
        self._carrier.close()

    def _ended(self, hop: CommTask) -> None:
        """Where the scheduler handles events."""
        assert isinstance(hop, RowHop)
        if hop.is_spread:
            self._counts.report(hop.row, self._reduced)
        elif self._counts.summed():
            self._tell_summed()

    def __repr__(self) -> str:
        return f"<RowExchange rank {self.group.rank} of {self.group.size}, {self._carrier!r}>"
