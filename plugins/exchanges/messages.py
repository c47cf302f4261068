"""Exchanges over Gloo: pairs of messages, one exchange after the other.

Receives are posted before sends. In Gloo's own all-to-all the rank that comes late sends first, and
the word that it can receive waits behind its bytes, so that the two directions of a link follow one
another (docs/notes/history.md).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final

from torch import Tensor

from bytesched import urgency
from bytesched.errors import SchedulerClosed

from ..failures import Failures
from ..routes.group import Group
from ..routes.messages import Messages, Waiter

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


@dataclass(eq=False)
class ExchangeTask:
    """One exchange: rows to every rank, and rows from each."""

    name: str
    #: the same on all ranks
    index: int
    #: by rank, what each gets
    sent: Sequence[Tensor]
    #: by rank, memory for what each sends
    rows: Sequence[Tensor]
    #: a store's chunks wait until it ends, with the exchange
    section: urgency.Section | None
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.nbytes = max(sum(part.nbytes for part in rows) for rows in (self.sent, self.rows))

    def end(self, error: BaseException | None = None) -> None:
        """Nothing of it is under way."""
        if self.section is not None:
            self.section.end()
        # What remembers the task must not keep its memory.
        self.sent = self.rows = ()
        self.error = error
        self.ended.set()


class Exchanges(Failures):
    """Exchanges of a group of Gloo, in the order in which a script begins them on all ranks."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._group = group
        self._messages = Messages(group)
        self._waiter = Waiter(self._messages, "bytesched-exchange", self.fail)
        #: exchanges that have not ended; those of them that have not started
        self._open: set[ExchangeTask] = set()
        self._waiting: deque[ExchangeTask] = deque()
        self._started_bytes = self._begun = 0

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
        with self.lock:
            task = ExchangeTask(name, self._begun % _NUMBERS, sent, rows, section)
            self._begun += 1
            if self.error is not None:
                task.end(self.error)
                raise self.error
            self._open.add(task)
            self._waiting.append(task)
            self._start_next()
        return task

    def wait(self, task: ExchangeTask) -> None:
        """Returns when ``task`` has ended. Raises an error of ours."""
        deadline_s = monotonic() + self._group.timeout_s
        while not task.ended.wait(_LOOK_S):
            if (lost := self._messages.lost()) is not None:
                self.fail(lost)
            if monotonic() > deadline_s:
                self.fail(self._group.error(RuntimeError("Timed out waiting"), task=task.name))
        if task.error is not None:
            raise task.error

    def close(self) -> None:
        """Ends the thread; what is under way fails. Idempotent."""
        self._waiter.stop()
        with self.lock:
            if self._open:
                self._group.abort()
            # What fails from here on is not handled any more: nobody else ends it.
            self.error = self.error or SchedulerClosed("these exchanges are closed")
            self._failed()

    # -- with the lock -----------------------------------------------------------------

    def _start_next(self) -> None:
        while self._waiting and self._started_bytes < _CREDIT_BYTES:
            task = self._waiting.popleft()
            try:
                works = self._issued(task)
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):
                    raise
                # It is raised where the exchange is awaited.
                return
            self._started_bytes += task.nbytes
            self._waiter.put(task.name, works, partial(self._ended, task))

    def _issued(self, task: ExchangeTask) -> list[tuple[Any, int]]:
        """The messages of ``task``: first what it receives."""
        group, mine = self._group, self._group.rank
        # Each rank's neighbours first, so that not all send to one.
        others = [(mine + distance) % group.size for distance in range(1, group.size)]
        works: list[tuple[Any, int]] = []
        try:
            for begin, parts, peers in (
                (group.receive, task.rows, others[::-1]),
                (group.send, task.sent, others),
            ):
                for peer in peers:
                    if parts[peer].numel():
                        tag = _tag(task.index, parts[peer].nbytes)
                        works.append((begin(parts[peer], peer, tag), peer))
        except RuntimeError as error:
            raise group.error(error, task=task.name) from error
        task.rows[mine].copy_(task.sent[mine])
        return works

    def _ended(self, task: ExchangeTask) -> None:
        """The messages of ``task`` have come. The waiter's thread, which has not the lock yet."""
        with self.lock:
            self._started_bytes -= task.nbytes
            self._open.discard(task)
            task.end(task.error)
            self._start_next()

    def _failed(self) -> None:
        self._waiting.clear()
        while self._open:
            self._open.pop().end(self.error)
