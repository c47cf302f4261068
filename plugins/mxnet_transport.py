"""What moves the pieces of an MXNet store, and tells how far they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from threading import Lock
from typing import Any

import mxnet as mx

from bytesched.errors import SchedulerClosed
from bytesched.plugins.mxnet_engine import Held, post
from bytesched.plugins.mxnet_keys import Piece, ServerKeys
from bytesched.task import CommTask
from bytesched.transport import Done

__all__ = ["Pulling", "Pushing"]

#: per server; as many can be under way at the same time
_ECHOES = 16
#: MXNet's default for arrays that it spreads over all servers, in elements
_SPREAD_ELEMENTS = 1_000_000
#: Above everything that computes: what is begun has been scheduled already, and shall go.
_NOW = 1_000_000


class _Moving(ABC):
    """A transport over the pieces of a store, by the index of their task; there may come more.

    Args:
        calling: held during every call of the store, which is made for one thread.
    """

    def __init__(self, store: Any, pieces: Sequence[Piece], calling: Lock) -> None:
        self._store = store
        self._pieces = pieces
        self._calling = calling
        self._lock = Lock()
        self._in_flight: dict[CommTask, Done] = {}
        self._closed = False

    def start(self, task: CommTask, done: Done) -> None:
        if self._closed:
            raise SchedulerClosed(f"{task!r} was started on a closed store")
        with self._lock:
            self._in_flight[task] = done
        try:
            with self._calling:
                self._begin(self._pieces[task.index], task)
        except BaseException:
            with self._lock:
                self._in_flight.pop(task)
            raise

    def close(self) -> None:
        self._closed = True
        for task in list(self._in_flight):
            self._end(task, SchedulerClosed(f"closed while {task.name} was under way"))

    @abstractmethod
    def _begin(self, piece: Piece, task: CommTask) -> None:
        """Gives the engine what moves ``piece``, and `_end` to be called after it."""

    def _end(self, task: CommTask, error: BaseException | None = None) -> None:
        with self._lock:
            done = self._in_flight.pop(task, None)
        if done is not None:
            done(task, error)


class Pulling(_Moving):
    """Fetches pieces; a task is done when its buffers are filled."""

    def _begin(self, piece: Piece, task: CommTask) -> None:
        self._store.pull(piece.number, out=piece.buffers, priority=_NOW)
        _when_free(piece.buffers, lambda: self._end(task))


class Pushing(_Moving):
    """Sends pieces; a task is done when its bytes have arrived at the server.

    MXNet tells only when the sum of *all* workers is there. Credit that waited for that could wait
    for ever: two workers with different pieces in their windows would each wait for the other's.
    So a value that nobody changes is pulled right behind each piece. Server and connection keep the
    order, so its answer says that the piece is through, whatever the other workers do.

    Args:
        numbers: where the keys of those values come from.
        summed: called, on any thread, when every worker has pushed a piece.
    """

    def __init__(
        self,
        store: Any,
        pieces: Sequence[Piece],
        calling: Lock,
        numbers: ServerKeys,
        summed: Callable[[Piece], None],
    ) -> None:
        super().__init__(store, pieces, calling)
        self._numbers = numbers
        self._summed = summed
        self._echoes: dict[int, Iterator[tuple[int, Any]]] = {}

    def make_echoes(self) -> None:
        """Before the first piece; every worker calls it."""
        numbers = self._numbers
        keys = [numbers.new() for _ in range(_ECHOES * numbers.num_servers)]
        self._store.init(keys, [mx.nd.zeros(1)] * len(keys))
        of_server: dict[int, list[tuple[int, Any]]] = {}
        for key in keys:
            of_server.setdefault(numbers.server(key), []).append((key, mx.nd.zeros(1)))
        self._echoes = {server: cycle(echoes) for server, echoes in of_server.items()}

    def _begin(self, piece: Piece, task: CommTask) -> None:
        self._store.push(piece.number, piece.buffers, priority=_NOW)
        _when_free(piece.buffers, lambda: self._summed(piece))
        servers = list(self._echoes)
        if task.stop_at - task.start_at < _SPREAD_ELEMENTS:
            servers = [self._numbers.server(piece.number)]
        echoes = [next(self._echoes[server]) for server in servers]
        for key, out in echoes:
            # Should the engine run it before the push, credit comes back one piece too early.
            self._store.pull(key, out=out, priority=_NOW - 1)
        _when_free([out for _, out in echoes], lambda: self._end(task))


def _when_free(arrays: Sequence[Any], call: Callable[[], None]) -> None:
    """Calls when the engine has done everything to ``arrays`` that it was given so far."""

    def began(held: Held) -> None:
        held.release()
        call()

    post(began, writes=arrays)
