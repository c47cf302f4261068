"""One thread that makes all MPI calls of a process: it posts, tests, and sleeps in between.

MPI has no event to wait for, and its own waits spin. So the thread sleeps on its inbox, for a
short time while transfers are under way and for a longer one when they are not.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from mpi4py import MPI

from bytesched.errors import MismatchError, PeerLost, TransportError

from .messages import LONGEST_BYTES, Message

_SHORTEST_NAP_S = 2e-5
_LONGEST_NAP_S = 3e-4
_TICK_S = 0.05


@dataclass
class _Posted:
    then: Callable[[], None]
    #: keeps its memory alive
    buffer: Any


@dataclass
class _Expected:
    buffer: Any
    rank: int
    tag: int
    then: Callable[[], None]
    what: str


class Role(Protocol):
    """What a rank is to the store, a worker or a server. Everything is called by the loop."""

    def on_message(self, rank: int, message: Message) -> None:
        """A message of ``rank`` is here."""

    def on_tick(self) -> None:
        """Called about every 50 ms, to look for what has waited too long."""

    def awaits(self) -> bool:
        """True while an answer is to come, so that the loop looks for it more often."""

    def fail(self, error: BaseException) -> None:
        """MPI or a callback raised ``error``; the first one is final."""


class Loop:
    """Makes the MPI calls of one process.

    Only `call`, `stop` and `has_ended` may be used from other threads, once it runs.

    Args:
        comm: a communicator that is used here alone.
        idle_nap_s: how long to sleep when nothing is under way.
    """

    def __init__(self, comm: Any, *, idle_nap_s: float) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self._idle_nap_s = idle_nap_s
        # Not a SimpleQueue: Python's waits for ever if a wait of microseconds is over before it has
        # looked at the clock again (3.11), as on a busy machine.
        self._inbox: deque[Callable[[], None]] = deque()
        #: held by the loop while there is nothing in the inbox
        self._empty = threading.Lock()
        self._requests: list[Any] = []
        self._posted: list[_Posted] = []
        #: requests that are not tested any more, with their memory, which MPI may still write to
        self._broken: list[tuple[Any, _Posted]] = []
        self._expected: list[_Expected] = []
        self._sends = 0
        self._stop_at_s = 0.0
        self._roles: list[Role] = []
        self._thread = threading.Thread(target=self.run, name="bytesched-mpi", daemon=True)

    def add(self, role: Role, tag: int) -> None:
        """``role`` gets the messages under ``tag``; before the loop runs."""
        self._roles.append(role)
        self._listen(role, tag, bytearray(LONGEST_BYTES))

    # -- any thread --------------------------------------------------------------------

    def call(self, what: Callable[[], None]) -> None:
        """Calls ``what`` in the loop's thread, soon."""
        self._inbox.append(what)
        # Another thread may have released it.
        with contextlib.suppress(RuntimeError):
            self._empty.release()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the loop when its sends have left, at the latest after ``timeout_s``."""

        def begin() -> None:
            self._stop_at_s = monotonic() + timeout_s

        self.call(begin)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s + 5.0)

    @property
    def has_ended(self) -> bool:
        """Whether MPI is free for other threads."""
        return not self._thread.is_alive()

    # -- the loop's thread -------------------------------------------------------------

    def send_message(self, rank: int, tag: int, message: Message) -> None:
        self.send(message.packed(self.rank), rank, tag)

    def send(
        self, buffer: Any, rank: int, tag: int, then: Callable[[], None] | None = None
    ) -> None:
        """Sends ``buffer``, and calls ``then`` when it may be reused."""
        self._sends += 1

        def sent() -> None:
            self._sends -= 1
            if then is not None:
                then()

        self.post(self.comm.Isend([buffer, MPI.BYTE], rank, tag), sent, buffer)

    def receive(self, buffer: Any, rank: int, tag: int, then: Callable[[], None]) -> None:
        self.post(self.comm.Irecv([buffer, MPI.BYTE], rank, tag), then, buffer)

    def receive_checked(
        self, buffer: Any, rank: int, tag: int, then: Callable[[], None], what: str
    ) -> None:
        """As `receive`; a message of another size is an error, and never touches ``buffer``.

        An empty bytearray takes any size.
        """
        self._expected.append(_Expected(buffer, rank, tag, then, what))

    def post(self, request: Any, then: Callable[[], None], buffer: Any) -> None:
        """Calls ``then`` when ``request``, which uses ``buffer``, is complete."""
        self._requests.append(request)
        self._posted.append(_Posted(then, buffer))

    def run(self) -> None:
        """Until `stop`."""
        nap_s = _SHORTEST_NAP_S
        tick_at_s = monotonic() + _TICK_S
        while not self._stop_at_s or (self._sends and monotonic() <= self._stop_at_s):
            progressed = self._guarded(self._test)
            now_s = monotonic()
            if now_s >= tick_at_s:
                tick_at_s = now_s + _TICK_S
                for role in self._roles:
                    self._guarded(role.on_tick)
            # One request of each role only listens.
            is_busy = self._expected or len(self._requests) > len(self._roles)
            if progressed:
                nap_s = _SHORTEST_NAP_S
            elif is_busy or any(role.awaits() for role in self._roles):
                nap_s = min(1.5 * nap_s, _LONGEST_NAP_S)
            else:
                nap_s = min(1.5 * nap_s, self._idle_nap_s)
            self._empty.acquire(timeout=nap_s)
            while self._inbox:
                self._guarded(self._inbox.popleft())
        for request in (*self._requests, *(request for request, _ in self._broken)):
            with contextlib.suppress(MPI.Exception):
                request.Cancel()

    def _fail(self, error: BaseException) -> None:
        for role in self._roles:
            role.fail(error)

    def _guarded(self, what: Callable[[], bool | None]) -> bool | None:
        try:
            return what()
        except Exception as error:  # noqa: BLE001 - it must reach those that wait
            self._fail(error)
            return None

    def _test(self) -> bool:
        try:
            progressed = self._probe()
            while done := MPI.Request.Testsome(self._requests):
                finished = [self._posted[index] for index in done]
                for index in sorted(done, reverse=True):
                    del self._requests[index], self._posted[index]
                for posted in finished:
                    self._guarded(posted.then)
                progressed = True
        except MPI.Exception as error:
            self._set_aside_broken()
            raise self._explained(error) from error
        return progressed

    def _probe(self) -> bool:
        """Receives what has come, whose size is looked at before."""
        status = MPI.Status()
        waiting = []
        for expected in self._expected:
            message = self.comm.Improbe(expected.rank, expected.tag, status)
            if message is None:
                waiting.append(expected)
                continue
            nbytes = status.Get_count(MPI.BYTE)
            if isinstance(expected.buffer, bytearray):
                expected.buffer.extend(bytes(nbytes))
            room = memoryview(expected.buffer).nbytes
            if nbytes != room:
                self._fail(
                    MismatchError(
                        f"{expected.what}: rank {expected.rank} sent {nbytes} bytes instead of "
                        f"{room}"
                    )
                )
                continue
            request = message.Irecv([expected.buffer, MPI.BYTE])
            self.post(request, expected.then, expected.buffer)
        progressed = len(waiting) < len(self._expected)
        self._expected = waiting
        return progressed

    def _set_aside_broken(self) -> None:
        """Takes out requests that cannot be tested any more; others may still complete.

        One of them may be active: a receive from any rank is, with fault tolerance on, when one is
        gone, and takes what the others send.
        """
        for index in reversed(range(len(self._requests))):
            try:
                self._requests[index].Test()
            except MPI.Exception:
                self._broken.append((self._requests.pop(index), self._posted.pop(index)))
        self._sends = 0

    def _explained(self, error: Any) -> TransportError:
        text = error.Get_error_string()
        gone: list[int] = []
        with contextlib.suppress(MPI.Exception, NotImplementedError, AttributeError):
            failed = self.comm.Get_failed()
            gone = list(MPI.Group.Translate_ranks(failed, None, self.comm.Get_group()))
        if gone:
            ranks = ", ".join(map(str, gone))
            return PeerLost(f"rank {ranks} of the store is gone ({text})", rank=self.rank)
        return TransportError(f"MPI reports: {text}", rank=self.rank)

    def _listen(self, role: Role, tag: int, buffer: bytearray) -> None:
        def arrived() -> None:
            source, message = Message.unpacked(buffer)
            self._listen(role, tag, buffer)
            role.on_message(source, message)

        self.receive(buffer, MPI.ANY_SOURCE, tag, arrived)
