"""What moves the chunks of an MXNet store, and reports their ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from bytesched.errors import SchedulerClosed
from bytesched.task import CommTask
from bytesched.transport import Done

from .engine import Held, post
from .keys import Chunk

__all__ = ["Pulling", "Pushing"]

#: Above everything that computes: what is begun has been scheduled already, and leaves at once.
_NOW = 1_000_000


class _Moving(ABC):
    """A transport over the chunks of a store, by the index of their task; there may come more.

    Args:
        calling: held during every call of the store, which is made for one thread.
    """

    def __init__(self, store: Any, chunks: Sequence[Chunk], calling: Lock) -> None:
        self._store = store
        self._chunks = chunks
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
                self._begin(self._chunks[task.index], task)
        except BaseException:
            with self._lock:
                self._in_flight.pop(task)
            raise

    def close(self) -> None:
        self._closed = True
        for task in list(self._in_flight):
            self._end(task, SchedulerClosed(f"closed while {task.name} was under way"))

    @abstractmethod
    def _begin(self, chunk: Chunk, task: CommTask) -> None:
        """Gives the engine what moves ``chunk``, and `_end` to be called after it."""

    def _end(self, task: CommTask, error: BaseException | None = None) -> None:
        with self._lock:
            done = self._in_flight.pop(task, None)
        if done is not None:
            done(task, error)


class Pulling(_Moving):
    """Fetches chunks; a task is done when its buffers are filled."""

    def _begin(self, chunk: Chunk, task: CommTask) -> None:
        self._store.pull(chunk.number, out=chunk.buffers, priority=_NOW)
        _when_free(chunk.buffers, lambda: self._end(task))


class Pushing(_Moving):
    """Sends chunks; a task is done when the server has answered: every worker has pushed.

    The answer to a chunk that is pushed and pulled brings its value, for a pull that is asked for
    later would stand behind all that is being pushed.

    Args:
        answered: called, on any thread, for each chunk after its answer.
    """

    def __init__(
        self,
        store: Any,
        chunks: Sequence[Chunk],
        calling: Lock,
        answered: Callable[[Chunk], None],
    ) -> None:
        super().__init__(store, chunks, calling)
        self._answered = answered
        self._answers = 0
        self._answers_before = 0

    def go_on(self) -> None:
        """Ends all tasks, if nothing was answered since the last call; their answers may come.

        Workers may push in different orders, and wait in between. Then the window can be full of
        chunks that another worker only pushes after one that is still to be sent from here.
        """
        if self._answers == self._answers_before:
            for task in list(self._in_flight):
                self._end(task)
        self._answers_before = self._answers

    def _begin(self, chunk: Chunk, task: CommTask) -> None:
        if chunk.slot.call == "pushpull":
            self._store.pushpull(chunk.number, chunk.buffers, out=chunk.buffers, priority=_NOW)
        else:
            self._store.push(chunk.number, chunk.buffers, priority=_NOW)

        def answered() -> None:
            self._answers += 1
            self._end(task)
            self._answered(chunk)

        _when_free(chunk.buffers, answered)


def _when_free(arrays: Sequence[Any], call: Callable[[], None]) -> None:
    """Calls when the engine has done everything to ``arrays`` that it was given so far."""

    def began(held: Held) -> None:
        held.release()
        call()

    post(began, writes=arrays)
