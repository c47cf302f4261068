"""What moves the pieces of an MXNet store, and tells how far they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from bytesched.errors import SchedulerClosed
from bytesched.plugins.mxnet.engine import Held, post
from bytesched.plugins.mxnet.keys import Piece
from bytesched.task import CommTask
from bytesched.transport import Done

__all__ = ["Pulling", "Pushing"]

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
    """Sends pieces; a task is done when the server has answered: every worker has pushed.

    The answer to a piece that is pushed and pulled brings its value, for a pull that is asked for
    later would stand behind all that is being pushed.

    Args:
        answered: called, on any thread, for each piece after its answer.
    """

    def __init__(
        self,
        store: Any,
        pieces: Sequence[Piece],
        calling: Lock,
        answered: Callable[[Piece], None],
    ) -> None:
        super().__init__(store, pieces, calling)
        self._answered = answered
        self._answers = 0
        self._answers_before = 0

    def go_on(self) -> None:
        """Ends all tasks, if nothing was answered since the last call; their answers may come.

        Workers may push in different orders, and wait in between. Then the window can be full of
        pieces that another worker only pushes after one that is still to be sent from here.
        """
        if self._answers == self._answers_before:
            for task in list(self._in_flight):
                self._end(task)
        self._answers_before = self._answers

    def _begin(self, piece: Piece, task: CommTask) -> None:
        if piece.slot.call == "pushpull":
            self._store.pushpull(piece.number, piece.buffers, out=piece.buffers, priority=_NOW)
        else:
            self._store.push(piece.number, piece.buffers, priority=_NOW)

        def answered() -> None:
            self._answers += 1
            self._end(task)
            self._answered(piece)

        _when_free(piece.buffers, answered)


def _when_free(arrays: Sequence[Any], call: Callable[[], None]) -> None:
    """Calls when the engine has done everything to ``arrays`` that it was given so far."""

    def began(held: Held) -> None:
        held.release()
        call()

    post(began, writes=arrays)
