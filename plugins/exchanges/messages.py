"""Exchanges over Gloo: pairs of messages, which follow one another on each connection.

Receives are posted before sends. In Gloo's own all-to-all the rank that comes late sends first, and
the word that it can receive waits behind its bytes, so that the two directions of a link follow one
another (docs/notes/history.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from time import monotonic
from typing import Any, Final

from torch import Tensor

from bytesched import urgency
from bytesched.errors import SchedulerClosed

from ..failures import Failures
from ..routes.group import Group
from ..routes.messages import Messages, Waiter

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


class Exchanges(Failures):
    """Exchanges of a group of Gloo, in the order in which a script begins them on all ranks."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._group = group
        self._messages = Messages(group)
        self._waiter = Waiter(self._messages, "bytesched-exchange", self.fail)
        #: exchanges that have not ended
        self._open: set[Future[None]] = set()
        self._begun = 0

    def begin(
        self,
        name: str,
        sent: Sequence[Tensor],
        rows: Sequence[Tensor],
        section: urgency.Section | None,
    ) -> Callable[[], None]:
        """Begins to send ``sent[k]`` to each rank k, and to receive ``rows[k]`` from it.

        Returns what waits for the end, and raises an error of ours. So does this, of an earlier
        exchange.

        Args:
            section: a store's chunks wait until it ends, with the exchange.
        """
        ended: Future[None] = Future()
        if section is not None:
            ended.add_done_callback(lambda _: section.end())
        with self.lock:
            if self.error is not None:
                ended.set_exception(self.error)
                raise self.error
            self._open.add(ended)
            try:
                works = self._issued(name, sent, rows)
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):
                    raise
                # It is raised where the exchange is awaited.
            else:
                self._waiter.put(name, works, partial(self._ended, ended))
        return partial(self._wait, name, ended)

    def _wait(self, name: str, ended: Future[None]) -> None:
        deadline_s = monotonic() + self._group.timeout_s
        while not wait([ended], _LOOK_S).done:
            if (lost := self._messages.lost()) is not None:
                self.fail(lost)
            if monotonic() > deadline_s:
                self.fail(self._group.error(RuntimeError("Timed out waiting"), task=name))
        ended.result()

    def close(self) -> None:
        """Ends the thread; what is under way fails. Idempotent."""
        self._waiter.stop()
        with self.lock:
            if self._open:
                self._group.abort()
            # What fails from here on is not handled any more: nobody else ends it.
            self.error = self.error or SchedulerClosed("these exchanges are closed")
            self._failed()

    def _issued(
        self, name: str, sent: Sequence[Tensor], rows: Sequence[Tensor]
    ) -> list[tuple[Any, int]]:
        """The messages of an exchange: first what it receives."""
        group, mine = self._group, self._group.rank
        # The same on all ranks.
        index, self._begun = self._begun % _NUMBERS, self._begun + 1
        # Each rank's neighbours first, so that not all send to one.
        others = [(mine + distance) % group.size for distance in range(1, group.size)]
        works: list[tuple[Any, int]] = []
        try:
            for begin, parts, peers in (
                (group.receive, rows, others[::-1]),
                (group.send, sent, others),
            ):
                for peer in peers:
                    if parts[peer].numel():
                        tag = _tag(index, parts[peer].nbytes)
                        works.append((begin(parts[peer], peer, tag), peer))
        except RuntimeError as error:
            raise group.error(error, task=name) from error
        rows[mine].copy_(sent[mine])
        return works

    def _ended(self, ended: Future[None]) -> None:
        """The messages of an exchange have come. The waiter's thread, without the lock."""
        with self.lock:
            if ended in self._open:
                self._open.remove(ended)
                ended.set_result(None)

    def _failed(self) -> None:
        while self._open:
            self._open.pop().set_exception(self.error)
