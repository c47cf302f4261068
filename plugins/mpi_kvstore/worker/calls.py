"""What a worker has asked of its servers, until it is answered or has waited too long."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from bytesched.errors import (
    InvalidTransition,
    SchedulerClosed,
    SchedulerTimeout,
)
from bytesched.kvstore.protocol import Ended
from bytesched.plugins.mpi_kvstore.loop import TO_SERVER, Loop, Message, Op, push_tag

__all__ = ["Calls"]

#: Workers say that they live so often per timeout.
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
    """One worker's questions, and its one sticky error.

    Methods are for the loop's thread, except those that wait.

    Args:
        servers: ranks; the first one is where workers meet.
        timeout_s: how long an answer may take.
    """

    def __init__(self, rank: int, servers: list[int], timeout_s: float) -> None:
        self.closed = False
        #: the first error, which is final
        self.error: BaseException | None = None
        self._rank = rank
        self._servers = servers
        self._timeout_s = timeout_s
        self._loop: Loop
        self._pending: dict[tuple[str, int], _Pending] = {}
        self._asked = 0
        self._meetings = 0
        self._beat_at_s = 0.0

    def use(self, loop: Loop) -> None:
        """What to ask through."""
        self._loop = loop

    def fail(self, error: BaseException) -> None:
        """Whoever waits gets the first error, which is final, and every server is told.

        Called in the loop's thread.
        """
        if self.error is not None or self.closed:
            return
        self.error = error
        for pending in self.take_pending():
            pending.ended(error)
        message = Message(Op.FAILED, text=f"{type(error).__name__}\n{error.args[0]}")
        for server in self._servers:
            self._loop.tell(server, TO_SERVER, message)

    def fail_with(self, error: BaseException) -> None:
        """This worker will not go on; returns when that has been said. Any other thread."""
        said = threading.Event()

        def say() -> None:
            self.fail(error)
            said.set()

        self._loop.call(say)
        said.wait(self._timeout_s)

    def awaits(self) -> bool:
        """True while an answer is to come."""
        return bool(self._pending)

    def on_tick(self) -> None:
        """Looks for what has waited too long, and says that this worker lives."""
        now_s = monotonic()
        if self.closed or self.error is not None:
            return
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._timeout_s / _BEATS
            for server in self._servers:
                self._loop.tell(server, TO_SERVER, Message(Op.ALIVE))
        late = next((p for p in self._pending.values() if p.deadline_s < now_s), None)
        if late is not None:
            self.fail(
                SchedulerTimeout(
                    f"the server on rank {late.server} has not answered the {late.what} within "
                    f"{self._timeout_s:g} s: it is stopped, stuck or gone",
                    rank=self._rank,
                )
            )

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
        pending = self._pending.get((kind, number))
        if pending is None:
            return
        pending.missing -= 1
        if not pending.missing:
            del self._pending[kind, number]
            pending.ended(error)

    def take_pending(self) -> list[_Pending]:
        pending, self._pending = list(self._pending.values()), {}
        return pending

    # -- calls that wait, in any other thread ------------------------------------------

    def meet(self, what: str) -> None:
        """Returns when every worker has come here, to do the same."""
        number = self._meetings
        self._meetings += 1
        server = self._servers[0]

        def ask(ended: Ended) -> None:
            def begin() -> None:
                if self.expect("meet", number, what, server, ended):
                    self._loop.tell(server, TO_SERVER, Message(Op.MEET, step=number, text=what))

            self._loop.call(begin)

        self.wait(what, ask)

    def ask(
        self, op: int, server: int, what: str, key: int = -1, text: Any = None, memory: Any = None
    ) -> None:
        """A call that a server answers with DONE; ``memory`` follows it."""
        number = self._asked
        self._asked += 1
        nbytes = 0 if memory is None else memory.nbytes

        def ask(ended: Ended) -> None:
            def begin() -> None:
                if self.expect("call", number, what, server, ended):
                    message = Message(op, key, number, nbytes, text=json.dumps(text))
                    self._loop.tell(server, TO_SERVER, message)
                    if memory is not None:
                        self._loop.send(memory, server, push_tag(key))

            self._loop.call(begin)

        self.wait(what, ask)

    def wait(self, what: str, begin: Callable[[Ended], None]) -> None:
        self.check(what)
        ends: SimpleQueue[BaseException | None] = SimpleQueue()
        begin(ends.put)
        try:
            # The loop has a deadline of its own, which comes first unless it is dead.
            error = ends.get(timeout=2 * self._timeout_s)
        except Empty:
            raise SchedulerTimeout(
                f"the {what} has not ended within {2 * self._timeout_s:g} s", rank=self._rank
            ) from None
        if error is not None:
            raise error.with_traceback(None)

    def check(self, what: str) -> None:
        if self.closed:
            raise SchedulerClosed(f"{what} on a closed store")
        if self.error is not None:
            raise self.error.with_traceback(None)
