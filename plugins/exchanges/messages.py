"""Exchanges over Gloo: pairs of messages, as tasks of one lane.

Receives are posted before sends. In Gloo's own all-to-all the rank that comes late sends first, and
the word that it can receive waits behind its bytes, so that the two directions of a link follow one
another (docs/notes/history.md).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from torch import Tensor

from bytesched import urgency
from bytesched.core import SchedulerCore
from bytesched.errors import SchedulerClosed
from bytesched.order import Leading
from bytesched.policy import Fifo
from bytesched.scheduler import InTurn, Scheduler
from bytesched.task import CommTask
from bytesched.transport import Done

from ..routes.groups.group import Group
from ..routes.groups.messages import Messages
from ..routes.groups.waiter import Waiter

__all__ = ["ExchangeTask", "Exchanges"]

#: As long as less is on its way, the next exchange starts.
_CREDIT_BYTES: Final = 1 << 20
#: how often a wait looks for lost connections
_LOOK_S: Final = 0.2
#: Numbers that tell exchanges under way apart, on all ranks alike.
_NUMBERS: Final = 1024


#: Sizes are told apart up to multiples of this, a prime, so that tags have 31 bits.
_SIZES: Final = 999_983


def _tag(index: int, nbytes: int) -> int:
    """Of a message: ranks that disagree about its size wait for each other until their limit.

    Gloo ends the process that gets more bytes than it has room for.
    """
    # The middle bit keeps it apart from the tag of a message that is never sent.
    return (1 + nbytes % _SIZES) * 2 * _NUMBERS + _NUMBERS + index


class ExchangeTask(CommTask):
    """One exchange: rows to every rank, and rows from each.

    Args:
        index: the same on all ranks.
        sent: by rank, what each gets.
        rows: by rank, memory for what each sends.
        section: gradients wait until it ends, with the exchange.
    """

    __slots__ = ("ended", "error", "rows", "section", "sent")

    def __init__(
        self,
        name: str,
        index: int,
        sent: Sequence[Tensor],
        rows: Sequence[Tensor],
        section: urgency.Section | None,
    ) -> None:
        nbytes = max(sum(part.nbytes for part in sent), sum(part.nbytes for part in rows), 1)
        super().__init__(name, start_at=0, stop_at=nbytes)
        self.index = index
        self.sent = sent
        self.rows = rows
        self.section = section
        self.ended = threading.Event()
        self.error: BaseException | None = None


class Exchanges:
    """Exchanges of one group, in the order in which a script begins them, the same on all ranks.

    Args:
        group: of Gloo. Its messages are used here alone.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._messages = Messages(group)
        self._waiter = Waiter(self._messages, "bytesched-exchange")
        self._error: BaseException | None = None
        #: exchanges that have not ended
        self._open: set[ExchangeTask] = set()
        self._begun = 0
        self._scheduler = Scheduler(
            SchedulerCore(Leading(Fifo()), credit_bytes=_CREDIT_BYTES),
            self,
            on_finish=self._finished,
            on_error=self._failed,
            events=InTurn(),
        )

    def begin(
        self,
        name: str,
        sent: Sequence[Tensor],
        rows: Sequence[Tensor],
        section: urgency.Section | None,
    ) -> ExchangeTask:
        """Begins to send ``sent[k]`` to each rank k, and to receive ``rows[k]`` from it.

        Raises an error of ours, of an earlier exchange.
        """
        task = ExchangeTask(name, self._begun % _NUMBERS, sent, rows, section)
        self._begun += 1
        self._open.add(task)
        if self._error is not None:
            self._end(task)
            raise self._error
        task.notify_ready()
        self._scheduler.notify_ready(task)
        return task

    def wait(self, task: ExchangeTask) -> None:
        """Returns when ``task`` has ended. Raises an error of ours."""
        deadline_s = monotonic() + self._group.timeout_s
        while not task.ended.wait(_LOOK_S):
            if self._error is None and (lost := self._messages.lost()) is not None:
                self._scheduler.fail(lost)
            if monotonic() > deadline_s:
                self._scheduler.fail(
                    self._group.error(RuntimeError("Timed out waiting"), task=task.name)
                )
        if task.error is not None:
            raise task.error

    def close(self) -> None:
        """Ends the thread; what is under way fails. Idempotent."""
        self._waiter.stop()
        if self._open:
            self._group.abort()
        self._scheduler.close()
        # What fails from here on is not handled any more: nobody else ends it.
        self._failed(self._error or SchedulerClosed("these exchanges are closed"))

    # -- see transport.Transport ----------------------------------------------------------

    def start(self, task: CommTask, done: Done) -> None:
        """Begins ``task``: first what it receives."""
        assert isinstance(task, ExchangeTask)
        group, mine = self._group, self._group.rank
        # Closing takes them from the task.
        rows, sent = task.rows, task.sent
        # Each rank's neighbours first, so that not all send to one.
        others = [(mine + distance) % group.size for distance in range(1, group.size)]
        works: list[tuple[Any, int]] = []
        try:
            for peer in reversed(others):
                if rows[peer].numel():
                    tag = _tag(task.index, rows[peer].nbytes)
                    works.append((group.receive(rows[peer], peer, tag), peer))
            for peer in others:
                if sent[peer].numel():
                    tag = _tag(task.index, sent[peer].nbytes)
                    works.append((group.send(sent[peer], peer, tag), peer))
        except RuntimeError as error:
            raise group.error(error, task=task.name) from error
        rows[mine].copy_(sent[mine])
        self._waiter.put(task, works, done)

    def _finished(self, task: CommTask) -> None:
        assert isinstance(task, ExchangeTask)
        self._end(task)

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, SchedulerClosed):
            self._group.abort()
        self._error = error
        for task in tuple(self._open):
            task.error = error
            self._end(task)

    def _end(self, task: ExchangeTask) -> None:
        self._open.discard(task)
        if task.section is not None:
            task.section.end()
        # What remembers the task must not keep its memory.
        task.sent = task.rows = ()
        task.ended.set()

    def __repr__(self) -> str:
        return f"<Exchanges {self._begun} begun, {len(self._open)} open, {self._scheduler!r}>"
