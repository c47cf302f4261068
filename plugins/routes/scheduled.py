"""The carrier that schedules: one scheduler over a transport, in an order that all ranks keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Final, Protocol

from bytesched.core import SchedulerCore
from bytesched.observe import Observers
from bytesched.order import ReadyQueue
from bytesched.scheduler import Events, EventThread, Scheduler
from bytesched.task import CommTask
from bytesched.transport import Transport
from bytesched.tunable import Setting
from bytesched.urgency import URGENCY

from .carrier import Traffic

__all__ = ["Ordering", "ScheduledCarrier"]


#: how long the end of a session waits for a chunk that is being packed
_PATIENCE_S: Final = 5.0


class Ordering(Protocol):
    """How ranks come to issue chunks in one order."""

    @property
    def order(self) -> str:
        """The way at the moment, for ``stats()``."""

    def queue(self) -> ReadyQueue:
        """What chooses among the ready chunks of this rank."""

    def window_bytes(self, credit_bytes: int) -> int:
        """The credit of this rank, where the session's is ``credit_bytes``."""

    def bind(self, scheduler: Scheduler) -> None:
        """``scheduler`` is to keep the order; called once, before any chunk is ready."""

    def round_ends(self) -> None:
        """The last chunk of a round is reduced. Where the scheduler handles events."""

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        """There are other chunks, or another policy; between the same two rounds on all
        ranks, when nothing is under way. It may wait for the other ranks.
        """

    def close(self) -> None:
        """Stops what runs beside the scheduler."""


class ScheduledCarrier:
    """One rank's part in sending the chunks of a plan in one order (see carrier.Carrier).

    Args:
        chunks: those of the plan, a list that holds others after a new cut.
        transport: what sends them.
        ordering: how all ranks come to the same order.
        credit_bytes: the most bytes in flight at a time.
        events: where the scheduler's are handled; on a thread of its own if None. If not None,
            chunks that may start at once are submitted on a thread of their own: to pack them
            would hold up backward.
    """

    def __init__(
        self,
        chunks: Sequence[CommTask],
        transport: Transport,
        ordering: Ordering,
        *,
        credit_bytes: int,
        reduced: Callable[[CommTask], None],
        failed: Callable[[BaseException], None],
        observers: Observers,
        events: Events | None = None,
    ) -> None:
        self._chunks = chunks
        self._ordering = ordering
        self._reduced = reduced
        self._observers = observers
        #: chunks of this round that are not reduced yet
        self._left = len(chunks)
        self._submits = None if events is None else EventThread()
        self._scheduler = Scheduler(
            SchedulerCore(ordering.queue(), credit_bytes=ordering.window_bytes(credit_bytes)),
            transport,
            on_finish=self._finished,
            on_error=failed,
            observers=observers,
            events=events,
        )
        ordering.bind(self._scheduler)
        URGENCY.join(self._scheduler)

    @property
    def order(self) -> str:
        return self._ordering.order

    @property
    def traffic(self) -> Traffic:
        scheduler = self._scheduler
        return Traffic(
            scheduler.busy_ns, scheduler.tasks_started, scheduler.bytes_started, scheduler.cpu_ns
        )

    def submit(self, chunk: CommTask) -> None:
        if self._observers:
            # First: it may have been started when the next call returns.
            self._observers.on_flow("s", chunk.index, "backward", perf_counter_ns())
        submits = self._submits
        if submits is not None and self._scheduler.core.may_start(chunk):
            submits.put(self._scheduler.notify_ready, chunk)
        else:
            self._scheduler.notify_ready(chunk)

    def change(self, setting: Setting) -> None:
        self._left = len(self._chunks)
        self._ordering.change(self._chunks, setting)
        self._scheduler.set_credit(self._ordering.window_bytes(setting.credit_bytes))

    def story(self) -> str:
        return self._scheduler.core.story()

    def close(self) -> None:
        URGENCY.leave(self._scheduler)
        if self._submits is not None:
            self._submits.close()
            self._submits.join(_PATIENCE_S)
        self._scheduler.close()
        self._ordering.close()

    def __repr__(self) -> str:
        return f"<ScheduledCarrier {self.order}, {self._left} chunks left, {self._scheduler!r}>"

    def _finished(self, chunk: CommTask) -> None:
        """Where the scheduler handles events."""
        self._left -= 1
        if not self._left:
            # Before the last chunk is reported: the next round may begin then.
            self._left = len(self._chunks)
            self._ordering.round_ends()
        self._reduced(chunk)
