"""What a worker has asked of its servers, until it is answered or has waited too long."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from bytesched.errors import (
    InvalidTransition,
    MismatchError,
    SchedulerClosed,
    SchedulerTimeout,
)
from bytesched.kvstore.protocol import Ended

from .loop import Loop
from .messages import TO_SERVER, Message, Op, push_tag
from .server import Server
from .transfer import Transfer

#: How often, per timeout, a worker sends a sign of life.
_BEATS = 4


@dataclass(eq=False)
class _Pending:
    """What was asked of a server and is not answered."""

    what: str
    server: int
    ended: Ended
    deadline_s: float
    #: events that are still to come
    missing: int


class Calls:
    """One worker's open calls, and its one sticky error (see loop.Role).

    Methods are for the loop's thread, except below other headings. The first server is where
    workers meet.
    """

    def __init__(
        self, loop: Loop, transfer: Transfer, servers: list[int], timeout_s: float
    ) -> None:
        self.is_closed = False
        #: the first error, which is final
        self.error: BaseException | None = None
        self._loop = loop
        self._servers = servers
        self._timeout_s = timeout_s
        self._pending: dict[tuple[str, int], _Pending] = {}
        self._asked, self._meetings = itertools.count(), itertools.count()
        self._beat_at_s = 0.0
        self._by_op: dict[int, Callable[[int, Message], None]] = {
            Op.FAILED: lambda server, message: self.fail(message.error),
            Op.MET: self._met,
            Op.DONE: lambda server, message: self.came("call", message.step),
            Op.PUSHED: lambda server, message: self.came("push", message.key),
            Op.READY: transfer.ready,
        }

    # -- what the loop calls -----------------------------------------------------------

    def on_message(self, rank: int, message: Message) -> None:
        self._by_op[message.op](rank, message)

    def on_tick(self) -> None:
        """Looks for what has waited too long, and sends a sign of life."""
        now_s = monotonic()
        if self.is_closed or self.error is not None:
            return
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._timeout_s / _BEATS
            self.send_to_all(Message(Op.ALIVE))
        late = next((p for p in self._pending.values() if p.deadline_s < now_s), None)
        if late is not None:
            self.fail(
                SchedulerTimeout(
                    f"the server on rank {late.server} has not answered the {late.what} within "
                    f"{self._timeout_s:g} s: it is stopped, stuck or gone",
                    rank=self._loop.rank,
                )
            )

    def awaits(self) -> bool:
        return bool(self._pending)

    def fail(self, error: BaseException) -> None:
        """Every open call ends with the first error, which is final; servers get it as well."""
        if self.error is not None or self.is_closed:
            return
        self.error = error
        self._end_pending(lambda pending: error)
        self.send_to_all(Message.failed(error))

    # -- calls under way ---------------------------------------------------------------

    def expect(
        self, kind: str, number: int, what: str, server: int, ended: Ended, missing: int = 1
    ) -> bool:
        """Notes that an answer is to come; False if there will be none."""
        if self.error is not None:
            ended(self.error)
            return False
        if (kind, number) in self._pending:
            ended(InvalidTransition(f"{what}: one is under way already"))
            return False
        self._pending[kind, number] = _Pending(
            what, server, ended, monotonic() + self._timeout_s, missing
        )
        return True

    def came(self, kind: str, number: int, error: BaseException | None = None) -> None:
        """One of the events that a call waits for; the last one ends it."""
        pending = self._pending.get((kind, number))
        if pending is None:
            return
        pending.missing -= 1
        if not pending.missing:
            del self._pending[kind, number]
            pending.ended(error)

    def send_to_all(self, message: Message) -> None:
        for server in self._servers:
            self._loop.send_message(server, TO_SERVER, message)

    def _met(self, server: int, message: Message) -> None:
        error = MismatchError(message.body) if message.body else None
        self.came("meet", message.step, error)

    def _end_pending(self, error_of: Callable[[_Pending], BaseException]) -> None:
        ending, self._pending = list(self._pending.values()), {}
        for pending in ending:
            pending.ended(error_of(pending))

    # -- any other thread; most of these wait ------------------------------------------

    def meet(self, what: str) -> None:
        """Returns when every worker has come here, to do the same."""
        message = Message(Op.MEET, step=next(self._meetings), body=what)
        self._send(message, "meet", self._servers[0], what)

    def ask(
        self, op: int, server: int, what: str, key: int = -1, body: Any = None, memory: Any = None
    ) -> None:
        """A call that a server answers with DONE; ``memory`` follows it."""
        nbytes = 0 if memory is None else memory.nbytes
        message = Message(op, key, next(self._asked), nbytes, body=body)
        self._send(message, "call", server, what, memory)

    def _send(
        self, message: Message, kind: str, server: int, what: str, memory: Any = None
    ) -> None:
        def begin(ended: Ended) -> None:
            if self.expect(kind, message.step, what, server, ended):
                self._loop.send_message(server, TO_SERVER, message)
                if memory is not None:
                    self._loop.send(memory, server, push_tag(message.key))

        self.wait(what, begin)

    def wait(self, what: str, begin: Callable[[Ended], None]) -> None:
        """Calls ``begin`` in the loop's thread; returns when what it began has ended."""
        self.check(what)
        ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._loop.call(lambda: begin(ends.put))
        try:
            # The loop has a deadline of its own, which comes first unless it is dead.
            error = ends.get(timeout=2 * self._timeout_s)
        except Empty:
            raise SchedulerTimeout(
                f"the {what} has not ended within {2 * self._timeout_s:g} s", rank=self._loop.rank
            ) from None
        if error is not None:
            raise error.with_traceback(None)

    def check(self, what: str) -> None:
        """Raises SchedulerClosed after `close`, and the first error; ``what`` is refused then."""
        if self.is_closed:
            raise SchedulerClosed(f"{what} on a closed store")
        if self.error is not None:
            raise self.error.with_traceback(None)

    def fail_with(self, error: BaseException) -> None:
        """As `fail`; returns when that was done, or cannot be."""
        done = threading.Event()

        def fail() -> None:
            self.fail(error)
            done.set()

        self._loop.call(fail)
        done.wait(self._timeout_s)

    def close(self, server: Server | None) -> None:
        """Ends every call, and the loop when all workers have left ``server``, if there is one."""
        if self.is_closed:
            return
        self.is_closed = True
        left: SimpleQueue[None] = SimpleQueue()

        def leave() -> None:
            self._end_pending(lambda p: SchedulerClosed(f"closed during the {p.what}"))
            if self.error is None:
                self.send_to_all(Message(Op.BYE))
            if server is not None and server.is_serving:
                server.on_empty = lambda: left.put(None)
            else:
                left.put(None)

        self._loop.call(leave)
        try:
            left.get(timeout=self._timeout_s)
        except Empty:
            self.error = self.error or SchedulerTimeout(
                f"waited {self._timeout_s:g} s for the other workers to close the store",
                rank=self._loop.rank,
            )
        self._loop.stop(1.0)
