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
from bytesched.transport import Done, Transport
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

    Its pull begins when the push has ended and every one of ``asked_for`` was asked for.
    """

    __slots__ = ("key", "pull_into", "pull_task", "push_from", "push_task")

    def __init__(
        self,
        key: Key,
        push_task: CommTask,
        push_from: Any,
        pull_into: Any,
        *,
        asked_for: Sequence[CommTask],
    ) -> None:
        self.key = key
        self.push_task = push_task
        self.pull_task = _pull_task(push_task, asked_for)
        self.push_from = push_from
        self.pull_into = pull_into


def _pull_task(push: CommTask, asked_for: Sequence[CommTask]) -> CommTask:
    pull = CommTask(
        f"pull {push.name}",
        start_at=push.start_at,
        stop_at=push.stop_at,
        itemsize=push.itemsize,
        priority=push.priority,
    )
    # Itself stands for the end of the push.
    pull.members = (*asked_for, pull)
    pull.missing = len(pull.members)
    return pull


class Pipes:
    """Schedules the pushes and pulls of a plan over one store.

    Args:
        store: moves one chunk at a time per pipe, from a thread of ours, unless it is an
            AsyncKVStore, which is given as many as the credit allows; pulls need none if it answers
            by priority.
        chunks: of the plan, to which `add` may add; push tasks get the numbers from 0, pull tasks
            those that follow.
        on_push: the push of that chunk begins.
        on_pushed: the value of that chunk has left.
        on_pulled: the ``pull_into`` of that chunk is filled. These three on one thread.
        on_error: called with the first error of each pipe, which starts nothing after it.
    """

    def __init__(
        self,
        store: KVStore,
        chunks: Sequence[Chunk],
        *,
        policy: str,
        push_credit_bytes: int,
        pull_credit_bytes: int,
        on_pulled: Callable[[Chunk], None],
        on_error: Callable[[BaseException], None],
        on_push: Callable[[Chunk], None] = lambda chunk: None,
        on_pushed: Callable[[Chunk], None] = lambda chunk: None,
        observers: Observers | None = None,
    ) -> None:
        self._on_pushed = on_pushed
        self._on_pulled = on_pulled
        #: a pull's sources come on two threads
        self._lock = Lock()
        self._by_index: dict[int, Chunk] = {}
        for index, chunk in enumerate(chunks):
            chunk.push_task.index = index
            chunk.pull_task.index = len(chunks) + index
            self._by_index[index] = self._by_index[len(chunks) + index] = chunk

        events = EventThread()

        def scheduler(
            transport: Transport, credit_bytes: int, finished: Callable[[CommTask], None]
        ) -> Scheduler:
            return Scheduler(
                SchedulerCore(Leading(named_policy(policy)), credit_bytes=credit_bytes),
                transport,
                on_finish=finished,
                on_error=on_error,
                observers=observers,
                events=events,
            )

        if getattr(store, "answers_by_priority", False):
            pull_credit_bytes = _NO_LIMIT
        push, pull = _transports(store, self._by_index, on_push)
        self.pushes = scheduler(push, push_credit_bytes, self._pushed)
        self.pulls = scheduler(pull, pull_credit_bytes, self._pulled)
        URGENCY.join(self.pushes)
        URGENCY.join(self.pulls)

    def add(self, chunk: Chunk) -> None:
        """``chunk`` belongs to the plan from now on; its tasks get the next two numbers."""
        index = len(self._by_index)
        chunk.push_task.index, chunk.pull_task.index = index, index + 1
        self._by_index[index] = self._by_index[index + 1] = chunk

    def push(self, chunk: Chunk) -> None:
        """``push_from`` is complete; its push task is READY."""
        self.pushes.notify_ready(chunk.push_task)

    def ask(self, chunk: Chunk) -> None:
        """One member of ``chunk`` is asked for; its pull begins when all are, after the push."""
        with self._lock:
            is_ready = chunk.pull_task.notify_ready()
        if is_ready:
            self.pulls.notify_ready(chunk.pull_task)

    def story(self) -> str:
        """The last events of both pipes, for an error's message."""
        return f"{self.pushes.core.story()}\n{self.pulls.core.story()}"

    def close(self) -> None:
        """Stops both. Idempotent."""
        URGENCY.leave(self.pushes)
        URGENCY.leave(self.pulls)
        self.pushes.close()
        self.pulls.close()

    def _pushed(self, task: CommTask) -> None:
        chunk = self._by_index[task.index]
        self._on_pushed(chunk)
        self.ask(chunk)

    def _pulled(self, task: CommTask) -> None:
        self._on_pulled(self._by_index[task.index])


def _transports(
    store: Any, chunks: dict[int, Chunk], on_push: Callable[[Chunk], None]
) -> tuple[Transport, Transport]:
    if hasattr(store, "start_push"):

        def start_push(chunk: Chunk, ended: Ended) -> None:
            on_push(chunk)
            store.start_push(chunk.key, chunk.push_from, ended, _of(chunk))

        def start_pull(chunk: Chunk, ended: Ended) -> None:
            store.start_pull(chunk.key, chunk.pull_into, ended, _of(chunk))

        return _Starting(chunks, start_push), _Starting(chunks, start_pull)
    return (
        _Calling(chunks, on_push, lambda c: store.push(c.key, c.push_from, _of(c)), "push"),
        _Calling(chunks, _nothing, lambda c: store.pull(c.key, c.pull_into, _of(c)), "pull"),
    )


def _nothing(chunk: Chunk) -> None:
    pass


def _of(chunk: Chunk) -> int:
    """A chunk's priority as a store counts it."""
    return -chunk.push_task.priority


class _Starting:
    """A transport over transfers that report their end."""

    def __init__(self, chunks: dict[int, Chunk], begin: Callable[[Chunk, Ended], None]) -> None:
        self._chunks = chunks
        self._begin = begin
        self._in_flight: dict[CommTask, Done] = {}
        self._closed = False

    def start(self, task: CommTask, done: Done) -> None:
        if self._closed:
            raise SchedulerClosed(f"{task!r} was started on a closed store")
        self._in_flight[task] = done
        self._begin(self._chunks[task.index], partial(self._ended, task))

    def close(self) -> None:
        self._closed = True
        for task in list(self._in_flight):
            self._ended(task, SchedulerClosed(f"closed while {task.name} was under way"))

    def _ended(self, task: CommTask, error: BaseException | None) -> None:
        if (done := self._in_flight.pop(task, None)) is not None:
            done(task, error)


class _Calling:
    """A transport over calls that return at the end of a transfer; a thread makes them."""

    def __init__(
        self,
        chunks: dict[int, Chunk],
        before: Callable[[Chunk], None],
        call: Callable[[Chunk], None],
        name: str,
    ) -> None:
        self._chunks = chunks
        self._before = before
        self._call = call
        self._started: SimpleQueue[tuple[CommTask, Done] | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._run, name=f"bytesched-{name}", daemon=True)
        self._thread.start()

    def start(self, task: CommTask, done: Done) -> None:
        if self._closed:
            raise SchedulerClosed(f"{task!r} was started on a closed store")
        self._before(self._chunks[task.index])
        self._started.put((task, done))

    def close(self) -> None:
        self._closed = True
        self._started.put(None)
        if current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        while (started := self._started.get()) is not None:
            task, done = started
            error: BaseException | None = None
            if self._closed:
                error = SchedulerClosed(f"closed before {task.name} was begun")
            else:
                try:
                    self._call(self._chunks[task.index])
                except Exception as raised:  # noqa: BLE001 - whatever it is, it is waited for
                    error = raised
            done(task, error)
