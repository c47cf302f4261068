"""Two pipes in series: pushes and pulls, each under a credit of its own.

A duplex link carries the pull of one chunk beside the push of the next, if the credit of a push
returns when the push has ended, and not, as in ByteScheduler's code, with the pull.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any

from bytesched.core import SchedulerCore
from bytesched.errors import SchedulerClosed
from bytesched.kvstore.protocol import Ended, Key, KVStore
from bytesched.observe import Observers
from bytesched.order import Leading
from bytesched.policy import named_policy
from bytesched.scheduler import EventThread, Scheduler
from bytesched.task import CommTask
from bytesched.transport import Done
from bytesched.urgency import URGENCY

__all__ = ["Chunk", "Pipes", "chunks_on_their_way"]

_NO_LIMIT = 1 << 62


def chunks_on_their_way(servers: int) -> int:
    """How many chunks a worker's window of pushes has room for, in front of so many servers.

    The link of one server is narrower than those of the workers, whose chunks fill it together. In
    front of several, a worker's chunks have to fill its own link as well, while some of them wait
    behind those of other workers. How many servers there are makes no difference then: where all
    share all, each link has as many chunks as a window has.
    """
    return 2 if servers <= 1 else 6


class Chunk:
    """A key of the store, and the buffers that its pushes are read from and its pulls fill.

    Its pull begins when the push has ended and it was asked for.
    """

    __slots__ = ("key", "pull_into", "pull_task", "push_from", "push_task")

    def __init__(
        self, key: Key, push_task: CommTask, push_from: Any = None, pull_into: Any = None
    ) -> None:
        self.key = key
        self.push_task = push_task
        self.pull_task = CommTask(
            f"pull {push_task.name}",
            start_at=push_task.start_at,
            stop_at=push_task.stop_at,
            itemsize=push_task.itemsize,
            priority=push_task.priority,
        )
        # The end of the push, and itself for being asked for.
        self.pull_task.members = (push_task, self.pull_task)
        self.pull_task.missing = 2
        self.push_from = push_from
        self.pull_into = pull_into


class Pipes:
    """Schedules the pushes and pulls of chunks over one store.

    Args:
        store: moves one chunk at a time per pipe, from a thread of ours, unless it is an
            AsyncKVStore, which is given as many as the credit allows; pulls need none if it answers
            by priority.
        credit_bytes: of each pipe.
        on_pushed: the value of that chunk has left.
        on_pulled: the ``pull_into`` of that chunk is filled. These two on one thread.
        on_error: called with the first error of each pipe, which starts nothing after it.
    """

    def __init__(
        self,
        store: KVStore,
        *,
        policy: str,
        credit_bytes: int,
        on_pulled: Callable[[Chunk], None],
        on_error: Callable[[BaseException], None],
        on_pushed: Callable[[Chunk], None] = lambda chunk: None,
        observers: Observers | None = None,
    ) -> None:
        self._on_pushed = on_pushed
        self._on_pulled = on_pulled
        #: a pull's sources come on two threads
        self._lock = Lock()
        #: by the number of each of its tasks
        self._chunks: list[Chunk] = []
        events = EventThread()

        def scheduler(
            call: str, credit_bytes: int, finish: Callable[[CommTask], None]
        ) -> Scheduler:
            made = Scheduler(
                SchedulerCore(Leading(named_policy(policy)), credit_bytes=credit_bytes),
                _Moving(store, call, self._chunks),
                on_finish=finish,
                on_error=on_error,
                observers=observers,
                events=events,
            )
            URGENCY.join(made)
            return made

        self.pushes = scheduler("push", credit_bytes, self._pushed)
        if getattr(store, "answers_by_priority", False):
            credit_bytes = _NO_LIMIT
        self.pulls = scheduler("pull", credit_bytes, self._pulled)

    def add(self, chunk: Chunk) -> None:
        """``chunk`` belongs to them from now on; its tasks get the next two numbers."""
        index = len(self._chunks)
        chunk.push_task.index, chunk.pull_task.index = index, index + 1
        self._chunks += chunk, chunk

    def push(self, chunk: Chunk) -> None:
        """``push_from`` is complete."""
        chunk.push_task.notify_ready()
        self.pushes.notify_ready(chunk.push_task)

    def ask(self, chunk: Chunk) -> None:
        """The pull of ``chunk`` begins when its push has ended."""
        with self._lock:
            is_ready = chunk.pull_task.notify_ready()
        if is_ready:
            self.pulls.notify_ready(chunk.pull_task)

    def story(self) -> list[str]:
        """The last events of both pipes, for an error's message."""
        return [*self.pushes.core.story().splitlines(), *self.pulls.core.story().splitlines()]

    def close(self) -> None:
        """Stops both. Idempotent."""
        for pipe in (self.pushes, self.pulls):
            URGENCY.leave(pipe)
        for pipe in (self.pushes, self.pulls):
            pipe.close()

    def _pushed(self, task: CommTask) -> None:
        chunk = self._chunks[task.index]
        self._on_pushed(chunk)
        self.ask(chunk)

    def _pulled(self, task: CommTask) -> None:
        self._on_pulled(self._chunks[task.index])


class _Moving:
    """A transport over the pushes, or the pulls, of a store.

    Args:
        call: "push" or "pull".
        chunks: by the number of the task.
    """

    def __init__(self, store: Any, call: str, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._is_push = call == "push"
        self._in_flight: dict[CommTask, Done] = {}
        self._closed = False
        self._calls: _Calls | None = None
        if hasattr(store, f"start_{call}"):
            self._begin: Callable[[Key, Any, Ended, int], None] = getattr(store, f"start_{call}")
        else:
            self._calls = _Calls(getattr(store, call), f"bytesched-{call}")
            self._begin = self._calls.begin

    def start(self, task: CommTask, done: Done) -> None:
        if self._closed:
            raise SchedulerClosed(f"{task!r} was started on a closed store")
        self._in_flight[task] = done
        chunk = self._chunks[task.index]
        array = chunk.push_from if self._is_push else chunk.pull_into
        # A store counts priorities the other way round.
        self._begin(chunk.key, array, partial(self._ended, task), -chunk.push_task.priority)

    def close(self) -> None:
        self._closed = True
        if self._calls is not None:
            self._calls.close()
        for task in list(self._in_flight):
            self._ended(task, SchedulerClosed(f"closed while {task.name} was under way"))

    def _ended(self, task: CommTask, error: BaseException | None) -> None:
        if (done := self._in_flight.pop(task, None)) is not None:
            done(task, error)


class _Calls:
    """Calls that return at the end of a transfer, made one after another in a thread."""

    def __init__(self, call: Callable[[Key, Any, int], None], name: str) -> None:
        self._call = call
        self._begun: SimpleQueue[tuple[Key, Any, Ended, int] | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, key: Key, array: Any, ended: Ended, priority: int) -> None:
        self._begun.put((key, array, ended, priority))

    def close(self) -> None:
        """Begins no other one, and waits for that which is under way."""
        self._closed = True
        self._begun.put(None)
        if current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None and not self._closed:
            key, array, ended, priority = begun
            error: BaseException | None = None
            try:
                self._call(key, array, priority)
            except Exception as raised:  # noqa: BLE001 - whatever it is, it is waited for
                error = raised
            ended(error)
