"""How values travel between a worker and a server: in messages, or read from a shared window.

Both are used the same way. A worker *offers* a value and the server *takes* it; a server *gives*
a value and the worker, which has *asked* before, gets it.

A link carries what it is given in the order it is given. So a server has little under way at a
time, and what waits is chosen again whenever something has left or arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from bytesched.errors import PluginError

from .loop import Loop
from .messages import TO_WORKER, Message, Op, pull_tag, push_tag

_ALIGNMENT = 64
#: Values on their way to one worker at a time: the next is there when one has left.
_SENDING = 2


class Transfer:
    """Point-to-point messages, into memory that the receiver has posted.

    Everything but `release` is called in the loop's thread.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def offer(self, server: int, key: int, memory: Any, sent: Callable[[], None]) -> int:
        """Makes ``memory`` available; returns the offset to announce."""
        self._loop.send(memory, server, push_tag(key), sent)
        return 0

    def take(self, worker: int, message: Message, memory: Any, then: Callable[[], None]) -> None:
        """Fills ``memory`` with what a worker has offered, and announced by ``message``."""
        what = f"push of key {message.key}"
        self._loop.receive_checked(memory, worker, push_tag(message.key), then, what)

    def give(self, worker: int, key: int, memory: Any, then: Callable[[], None]) -> None:
        """Answers a worker that asked; ``then`` is called when ``memory`` may be reused."""
        self._loop.send(memory, worker, pull_tag(key), then)

    def ask(self, server: int, key: int, memory: Any, then: Callable[[], None]) -> None:
        """Gets ready for the answer of ``server``, which fills ``memory``."""
        self._loop.receive(memory, server, pull_tag(key), then)

    def ready(self, server: int, message: Message) -> None:
        """The answer of ``server`` can be read."""

    def forget(self, key: int) -> None:
        """``key`` is not used any more."""

    def release(self) -> None:
        """Gives back what MPI holds, once the loop has ended; waits for all, as MPI's end does."""


class OneSided(Transfer):
    """Windows of registered memory, which the receiver reads when it wants to.

    Every key has its place in the window from its first use on, and keeps it: no step allocates
    ("Fast Distributed Deep Learning over RDMA", EuroSys 2019, without its placement analysis).

    Args:
        window_bytes: of this rank; a worker needs room for all its keys, a server for its keys
            once for each worker.
    """

    def __init__(self, loop: Loop, window_bytes: int) -> None:
        super().__init__(loop)
        self._window = MPI.Win.Allocate(window_bytes, 1, comm=loop.comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        memory: Any = self._window.tomemory()
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._next = 0
        #: (key, peer) -> offset and size
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        #: places of forgotten keys, by size
        self._free: dict[int, list[int]] = {}
        self._asked: dict[int, tuple[Any, Callable[[], None]]] = {}

    def offer(self, server: int, key: int, memory: Any, sent: Callable[[], None]) -> int:
        offset = self._put(key, server, memory)
        sent()
        return offset

    def take(self, worker: int, message: Message, memory: Any, then: Callable[[], None]) -> None:
        self._read(worker, message.offset, memory, then)

    def give(self, worker: int, key: int, memory: Any, then: Callable[[], None]) -> None:
        offset = self._put(key, worker, memory)
        then()
        self._loop.send_message(worker, TO_WORKER, Message(Op.READY, key, offset=offset))

    def ask(self, server: int, key: int, memory: Any, then: Callable[[], None]) -> None:
        self._asked[key] = (memory, then)

    def ready(self, server: int, message: Message) -> None:
        memory, then = self._asked.pop(message.key)
        self._read(server, message.offset, memory, then)

    def forget(self, key: int) -> None:
        for place in reversed([place for place in self._places if place[0] == key]):
            offset, size = self._places.pop(place)
            if offset + size == self._next:
                self._next = offset
            else:
                self._free.setdefault(size, []).append(offset)

    def release(self) -> None:
        if MPI.Is_finalized():
            return
        self._memory = np.empty(0, dtype=np.uint8)
        self._window.Unlock_all()
        self._window.Free()

    def _read(self, rank: int, offset: int, memory: Any, then: Callable[[], None]) -> None:
        request = self._window.Rget([memory, MPI.BYTE], rank, [offset, memory.nbytes, MPI.BYTE])
        self._loop.post(request, then, memory)

    def _put(self, key: int, peer: int, memory: Any) -> int:
        place = self._places.get((key, peer))
        if place is None:
            place = self._places[key, peer] = self._reserve(memory.nbytes)
        offset = place[0]
        self._memory[offset : offset + memory.nbytes] = memory
        self._window.Sync()
        return offset

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._free.get(size):
            return self._free[size].pop(), size
        if self._next + size > self._memory.nbytes:
            raise PluginError(
                f"the window of rank {self._loop.rank}, of {self._memory.nbytes} bytes, is full: "
                f"raise window_bytes"
            )
        self._next += size
        return self._next - size, size


class Answers:
    """Sends values to one worker, the most urgent of those that are ready first.

    Workers need no window for their pulls: what is asked for and not ready occupies no link.
    """

    def __init__(self, rank: int, transfer: Transfer) -> None:
        self._rank = rank
        self._transfer = transfer
        self._sending = 0
        self._added = 0
        self._ready: list[tuple[int, int, int, Any]] = []

    def add(self, key: int, priority: int, memory: Any) -> None:
        self._added += 1
        heapq.heappush(self._ready, (-priority, self._added, key, memory))
        self._send_next()

    def _send_next(self) -> None:
        while self._ready and self._sending < _SENDING:
            self._sending += 1
            _, _, key, memory = heapq.heappop(self._ready)
            self._transfer.give(self._rank, key, memory, self._sent)

    def _sent(self) -> None:
        self._sending -= 1
        self._send_next()
