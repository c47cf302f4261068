"""What moves the pieces of an MXNet store, and tells how far they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from threading import Lock
from typing import Any

import mxnet as mx

from bytesched.errors import SchedulerClosed
from bytesched.plugins.mxnet_engine import Held, post
from bytesched.plugins.mxnet_keys import Piece, ServerKeys
from bytesched.task import CommTask
from bytesched.transport import Done

__all__ = ["StoreTransport"]

#: per server; as many can be under way at the same time
_ECHOES = 8
#: MXNet's default for arrays that it spreads over all servers, in elements
_SPREAD_ELEMENTS = 1_000_000
#: Above everything that computes: what is begun has been scheduled already, and shall go.
_NOW = 1_000_000


class StoreTransport:
    """Hands pieces to a store; a task is done when its bytes have arrived at the server.

    MXNet tells only when the sum of *all* workers is there. Credit that waited for that could wait
    for ever: two workers with different pieces in their windows would each wait for the other's.
    So a value that nobody changes is pulled right behind each piece. Server and connection keep the
    order, so its answer says that the piece is through, whatever the other workers do.

    Args:
        store: MXNet's own.
        pieces: by the index of their task; may grow.
        numbers: where the keys of the echoes come from.
        arrived: called, on any thread, when the store is done with a piece and its buffers.
    """

    def __init__(
        self,
        store: Any,
        pieces: Sequence[Piece],
        numbers: ServerKeys,
        arrived: Callable[[Piece], None],
    ) -> None:
        self._store = store
        self._pieces = pieces
        self._numbers = numbers
        self._arrived = arrived
        self._lock = Lock()
        self._in_flight: dict[CommTask, Done] = {}
        self._closed = False
        keys = [numbers.new() for _ in range(_ECHOES * numbers.num_servers)]
        store.init(keys, [mx.nd.zeros(1)] * len(keys))
        of_server: dict[int, list[tuple[int, Any]]] = {}
        for key in keys:
            of_server.setdefault(numbers.server(key), []).append((key, mx.nd.zeros(1)))
        self._echoes = {server: cycle(echoes) for server, echoes in of_server.items()}

    def start(self, task: CommTask, done: Done) -> None:
        """Begins what the slot of the piece is at: a push, a pull or both."""
        if self._closed:
            raise SchedulerClosed(f"{task!r} was started on a closed store")
        piece = self._pieces[task.index]
        with self._lock:
            self._in_flight[task] = done
        try:
            getattr(self, f"_{piece.slot.call}")(piece)
        except BaseException:
            self._in_flight.pop(task)
            raise

    def close(self) -> None:
        self._closed = True
        for task in list(self._in_flight):
            self._ended(task, SchedulerClosed(f"closed while {task.name} was under way"))

    def _pushpull(self, piece: Piece) -> None:
        self._store.pushpull(piece.number, piece.buffers, out=piece.buffers, priority=_NOW)
        self._watch(piece.buffers, lambda: self._arrived(piece))
        self._echo(piece)

    def _push(self, piece: Piece) -> None:
        self._store.push(piece.number, piece.buffers, priority=_NOW)
        self._watch(piece.buffers, lambda: self._arrived(piece))
        self._echo(piece)

    def _pull(self, piece: Piece) -> None:
        self._store.pull(piece.number, out=piece.buffers, priority=_NOW)

        def ended() -> None:
            self._ended(piece.task, None)
            self._arrived(piece)

        self._watch(piece.buffers, ended)

    def _echo(self, piece: Piece) -> None:
        """Should the engine run one before its piece, credit comes back one piece too early."""
        task = piece.task
        servers = list(self._echoes)
        if task.stop_at - task.start_at < _SPREAD_ELEMENTS:
            servers = [self._numbers.server(piece.number)]
        outs = []
        for server in servers:
            key, out = next(self._echoes[server])
            self._store.pull(key, out=out, priority=_NOW - 1)
            outs.append(out)
        self._watch(outs, lambda: self._ended(task, None))

    def _watch(self, arrays: Sequence[Any], ended: Callable[[], None]) -> None:
        """Calls ``ended`` when the engine has done everything to ``arrays`` that it knows of."""

        def began(held: Held) -> None:
            held.release()
            ended()

        post(began, writes=arrays)

    def _ended(self, task: CommTask, error: BaseException | None) -> None:
        with self._lock:
            done = self._in_flight.pop(task, None)
        if done is not None:
            done(task, error)
