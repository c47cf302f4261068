"""One thread that makes all MPI calls of a process: it posts, tests, and sleeps in between.

MPI has no event to wait for, and its own waits spin. So the thread sleeps on its inbox, for a
short time while transfers are under way and for a longer one when they are not.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

from mpi4py import MPI

from bytesched.errors import MismatchError, PeerLost, TransportError

__all__ = ["TO_SERVER", "TO_WORKER", "Loop", "Message", "Op", "pull_tag", "push_tag"]

TO_SERVER = 1
TO_WORKER = 2
_FIRST_DATA_TAG = 16

_HEADER = struct.Struct("<8q")
_LONGEST_BYTES = 16384

_SHORTEST_NAP_S = 2e-5
_LONGEST_NAP_S = 3e-4
_TICK_S = 0.05


class Op:
    """What a message is about."""

    # to a server
    MEET, INIT, DELETE, PUSH, PULL, OPTIMIZER, GET_STATE, SET_STATE, ALIVE, BYE = range(10)
    # to a worker
    MET, DONE, PUSHED, READY, STATE = range(10, 15)
    # to both
    FAILED = 15


class Message(NamedTuple):
    """A short message; its numbers mean what its op says."""

    op: int
    key: int = -1
    step: int = 0
    nbytes: int = 0
    priority: int = 0
    offset: int = 0
    text: str = ""

    def packed(self, source: int) -> bytes:
        """Its bytes on the wire, from rank ``source``."""
        text = self.text.encode()[: _LONGEST_BYTES - _HEADER.size]
        return _HEADER.pack(*self[:6], source, len(text)) + text

    @classmethod
    def unpacked(cls, data: bytearray) -> tuple[int, Message]:
        """The source, and the message."""
        op, key, step, nbytes, priority, offset, source, length = _HEADER.unpack_from(data)
        text = data[_HEADER.size : _HEADER.size + length].decode(errors="replace")
        return source, cls(op, key, step, nbytes, priority, offset, text)


def push_tag(key: int) -> int:
    """The tag under which a worker sends values of ``key``."""
    return _FIRST_DATA_TAG + 2 * key


def pull_tag(key: int) -> int:
    """The tag under which a server sends values of ``key``."""
    return _FIRST_DATA_TAG + 2 * key + 1


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


class Loop:
    """Makes the MPI calls of one process; only `call` and `stop` may be used from other threads.

    Args:
        comm: nobody else uses it.
        on_message: called with source and message, by tag (TO_SERVER, TO_WORKER).
        on_tick: called about every 50 ms.
        on_error: called with errors of MPI and of callbacks.
        awaits: true while an answer is to come.
        idle_nap_s: how long to sleep when nothing is under way.
    """

    def __init__(
        self,
        comm: Any,
        on_message: dict[int, Callable[[int, Message], None]],
        *,
        on_tick: Callable[[], None],
        on_error: Callable[[BaseException], None],
        awaits: Callable[[], object],
        idle_nap_s: float,
    ) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self._on_tick = on_tick
        self._on_error = on_error
        self._awaits = awaits
        self._idle_nap_s = idle_nap_s
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._requests: list[Any] = []
        self._posted: list[_Posted] = []
        self._expected: list[_Expected] = []
        self._sends = 0
        self._stop_at_s = 0.0
        self._thread: threading.Thread | None = None
        for tag, heard in on_message.items():
            self._listen(tag, heard, bytearray(_LONGEST_BYTES))
        self._listening = len(on_message)

    # -- any thread --------------------------------------------------------------------

    def call(self, what: Callable[[], None]) -> None:
        """Calls ``what`` in the loop's thread, soon."""
        self._inbox.put(what)

    def start(self) -> None:
        """Runs in a thread of its own."""
        self._thread = threading.Thread(target=self.run, name="bytesched-mpi", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the loop when its sends have left, at the latest after ``timeout_s``."""

        def begin() -> None:
            self._stop_at_s = monotonic() + timeout_s

        self._inbox.put(begin)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s + 5.0)

    @property
    def has_ended(self) -> bool:
        """Whether MPI is free for other threads."""
        return self._thread is not None and not self._thread.is_alive()

    # -- the loop's thread -------------------------------------------------------------

    def tell(self, rank: int, tag: int, message: Message) -> None:
        """Sends a short message."""
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
        """Fills ``buffer``, and calls ``then``."""
        self.post(self.comm.Irecv([buffer, MPI.BYTE], rank, tag), then, buffer)

    def receive_checked(
        self, buffer: Any, rank: int, tag: int, then: Callable[[], None], what: str
    ) -> None:
        """As `receive`; a message of another size is an error, and never touches ``buffer``."""
        self._expected.append(_Expected(buffer, rank, tag, then, what))

    def post(self, request: Any, then: Callable[[], None], buffer: Any) -> None:
        """Calls ``then`` when ``request``, which uses ``buffer``, is complete."""
        self._requests.append(request)
        self._posted.append(_Posted(then, buffer))

    def run(self) -> None:
        """Until `stop`."""
        nap_s = _SHORTEST_NAP_S
        tick_at_s = monotonic() + _TICK_S
        while not self._has_stopped():
            progressed = self._guarded(self._test)
            now_s = monotonic()
            if now_s >= tick_at_s:
                tick_at_s = now_s + _TICK_S
                self._guarded(self._on_tick)
            if progressed:
                nap_s = _SHORTEST_NAP_S
            else:
                busy = self._awaits() or self._expected or len(self._requests) > self._listening
                nap_s = min(1.5 * nap_s, _LONGEST_NAP_S if busy else self._idle_nap_s)
            try:
                self._guarded(self._inbox.get(timeout=nap_s))
                while True:
                    self._guarded(self._inbox.get_nowait())
            except Empty:
                pass
        for request in self._requests:
            with contextlib.suppress(MPI.Exception):
                request.Cancel()

    def _has_stopped(self) -> bool:
        return bool(self._stop_at_s) and (not self._sends or monotonic() > self._stop_at_s)

    def _guarded(self, what: Callable[[], bool | None]) -> bool | None:
        try:
            return what()
        except Exception as error:  # noqa: BLE001 - it must reach whoever waits
            self._on_error(error)
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
            self._drop_broken()
            raise self._explained(error) from error
        return progressed

    def _probe(self) -> bool:
        """Receives what has come; before that, its size is known."""
        status = MPI.Status()
        waiting = []
        for expected in self._expected:
            message = self.comm.Improbe(expected.rank, expected.tag, status)
            if message is None:
                waiting.append(expected)
                continue
            nbytes, room = status.Get_count(MPI.BYTE), expected.buffer.nbytes
            if nbytes != room:
                self._on_error(
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

    def _drop_broken(self) -> None:
        """Forgets requests that cannot be tested any more; others may still complete."""
        for index in reversed(range(len(self._requests))):
            try:
                self._requests[index].Test()
            except MPI.Exception:
                del self._requests[index], self._posted[index]
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

    def _listen(self, tag: int, heard: Callable[[int, Message], None], buffer: bytearray) -> None:
        def arrived() -> None:
            source, message = Message.unpacked(buffer)
            self._listen(tag, heard, buffer)
            heard(source, message)

        self.receive(buffer, MPI.ANY_SOURCE, tag, arrived)
