"""Two pipes in series: pushes and pulls, each under a credit of its own.

A duplex link carries the pull of one chunk beside the push of the next, if the credit of a push
returns when the push has ended, and not, as in ByteScheduler's code, with the pull.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any

from bytesched.core import SchedulerCore
from bytesched.errors import SchedulerClosed, SchedulerTimeout
from bytesched.kvstore.protocol import Ended, Key
from bytesched.observe import Observers
from bytesched.order import Leading, ReadyQueue
from bytesched.policy import named_policy
from bytesched.scheduler import Done, EventThread, Scheduler
from bytesched.task import CommTask
from bytesched.urgency import URGENCY

#: of a window that has room for everything
NO_LIMIT = 1 << 62


def chunks_on_their_way(servers: int) -> int:
    """How many chunks a worker's window of pushes has room for, in front of so many servers.

    The link of one server is narrower than those of the workers, whose chunks fill it together. In
    front of several, a worker's chunks have to fill its own link as well, while some of them wait
    behind those of other workers. How many servers there are makes no difference then: where all
    share all, each link has as many chunks as a window has.
    """
    return 2 if servers <= 1 else 6


class Work(Future[None]):
    """The end of a push or a pull, in the words of torch.distributed."""

    def is_completed(self) -> bool:
        """Whether it has come, or cannot."""
        return self.done()

    def get_future(self) -> Work:
        """What tells of it."""
        return self


class Chunk:
    """A key of the store, and the tasks of its pushes and pulls.

    Args:
        follows: a pull begins when it was asked for and the push before it has ended.
    """

    __slots__ = ("key", "pull_task", "push_task")

    def __init__(self, key: Key, push_task: CommTask, *, follows: bool = True) -> None:
        self.key = key
        self.push_task = push_task
        self.pull_task = CommTask(
            f"pull {push_task.name}",
            start_at=push_task.start_at,
            stop_at=push_task.stop_at,
            itemsize=push_task.itemsize,
            priority=push_task.priority,
            sources=2 if follows else 1,
        )

    def set_priority(self, priority: int) -> None:
        """Lower goes first; nothing of it is under way."""
        self.push_task.priority = self.pull_task.priority = priority


class Pipes:
    """Schedules the pushes and pulls of chunks over one store.

    Args:
        store: moves one chunk at a time per pipe, from a thread of ours, unless it is an
            AsyncKVStore, which is given as many as the credit allows; pulls need none if it answers
            by priority.
        credit_bytes: of each pipe.
        timeout_s: of every wait.
        on_error: called with the first error, which is final; a pipe that has one starts nothing
            after it.
        pushes: which push is next, in place of the policy; all that it chooses start at once.
        announce: see `Scheduler`, of pushes.
    """

    def __init__(
        self,
        store: Any,
        *,
        policy: str,
        credit_bytes: int,
        timeout_s: float,
        on_error: Callable[[BaseException], None] = lambda error: None,
        observers: Observers | None = None,
        pushes: ReadyQueue | None = None,
        announce: Callable[[Sequence[CommTask]], None] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        #: the first error, which is final
        self.error: BaseException | None = None
        self._unobserve = URGENCY.observe(observers) if observers is not None else lambda: None
        self._rank = store.rank
        self._on_error = on_error
        #: guards the error, what it ends, and pulls, whose sources come on two threads
        self._lock = Lock()
        #: by the number of each of its tasks
        self._chunks: list[Chunk] = []
        #: what was begun and has not ended, with its memory
        self._begun: dict[CommTask, tuple[Work, Any]] = {}
        # A section that held an order of all workers would hold all workers.
        is_alone = pushes is None and announce is None
        events = EventThread()

        def scheduler(
            call: str,
            finish: Callable[[CommTask], None],
            queue: ReadyQueue | None = None,
            announce: Callable[[Sequence[CommTask]], None] | None = None,
        ) -> Scheduler:
            made = Scheduler(
                SchedulerCore(
                    Leading(named_policy(policy)) if queue is None else queue,
                    credit_bytes=NO_LIMIT,
                ),
                _Moving(store, call, self._details),
                announce=announce,
                on_finish=finish,
                on_error=self.fail,
                observers=observers,
                events=events,
            )
            if is_alone:
                URGENCY.join(made)
            return made

        self.pushes = scheduler("push", self._pushed, pushes, announce)
        self.pulls = scheduler("pull", self._end)
        self._limited = [] if pushes is not None else [self.pushes]
        if not getattr(store, "answers_by_priority", False):
            self._limited.append(self.pulls)
        self.limit(credit_bytes)

    def limit(self, credit_bytes: int) -> None:
        for pipe in self._limited:
            pipe.core.credit_bytes = credit_bytes

    @property
    def chunk_count(self) -> int:
        return len(self._chunks) // 2

    def add(self, chunk: Chunk) -> None:
        """``chunk`` belongs to them from now on; its tasks get the next two numbers."""
        index = len(self._chunks)
        chunk.push_task.index, chunk.pull_task.index = index, index + 1
        self._chunks += chunk, chunk

    def push(self, chunk: Chunk, array: Any) -> Work:
        """``array`` is complete; the work ends when its value has left."""
        return self._begin(self.pushes, chunk.push_task, array)

    def pull(self, chunk: Chunk, array: Any) -> Work:
        """``array`` is to be filled; the work ends when it is."""
        return self._begin(self.pulls, chunk.pull_task, array)

    def _begin(self, pipe: Scheduler, task: CommTask, array: Any) -> Work:
        work, is_ready = Work(), False
        with self._lock:
            if self.error is None:
                is_ready = task.notify_ready()
                self._begun[task] = work, array
            else:
                work.set_exception(self.error)
        if is_ready:
            pipe.notify_ready(task)
        return work

    def fail(self, error: BaseException) -> None:
        """All that is under way ends with the first error, and all that follows. Any thread."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            begun, self._begun = self._begun, {}
        self._on_error(error)
        for work, _ in begun.values():
            work.set_exception(error)

    def wait(
        self, work: Future[None], what: str, task: str = "", timeout_s: float | None = None
    ) -> None:
        """Returns when ``work`` has ended; raises its error, or SchedulerTimeout."""
        timeout_s = timeout_s or self.timeout_s
        is_held = URGENCY.is_held and not work.done()
        with URGENCY.waiting() if is_held else nullcontext():
            try:
                error = work.exception(timeout_s)
            except TooLate:
                what = f"waited {timeout_s:g} s for {what}"
                raise SchedulerTimeout(
                    what, task=task, rank=self._rank, story=self.story()
                ) from None
        if error is not None:
            raise error.with_traceback(None)

    def story(self) -> list[str]:
        """The last events of both pipes, for an error's message."""
        return [*self.pushes.core.story().splitlines(), *self.pulls.core.story().splitlines()]

    def figures(self, steps: int) -> dict[str, int | float]:
        """Figures since the start, times per step."""
        started = self.pushes.tasks_started + self.pulls.tasks_started
        cpu_us = (self.pushes.cpu_ns + self.pulls.cpu_ns) / 1e3
        return {
            "push_ms": self.pushes.busy_ns / 1e6 / steps,
            "pull_ms": self.pulls.busy_ns / 1e6 / steps,
            "scheduler_cpu_us_per_chunk": cpu_us / max(started, 1),
            "chunks": self.chunk_count,
        }

    def close(self) -> None:
        """Stops both. Idempotent; what is under way never ends."""
        self._unobserve()
        for pipe in (self.pushes, self.pulls):
            URGENCY.leave(pipe)
        for pipe in (self.pushes, self.pulls):
            pipe.close()

    # -- where events are handled ------------------------------------------------------

    def _details(self, task: CommTask) -> tuple[Key, Any, int]:
        """Key, memory and priority of what starts."""
        with self._lock:
            if self.error is not None:
                raise self.error
            _, array = self._begun[task]
        return self._chunks[task.index].key, array, task.priority

    def _pushed(self, task: CommTask) -> None:
        pull = self._chunks[task.index].pull_task
        if pull.sources > 1:
            with self._lock:
                is_ready = pull.notify_ready()
            if is_ready:
                self.pulls.notify_ready(pull)
        self._end(task)

    def _end(self, task: CommTask) -> None:
        with self._lock:
            work, _ = self._begun.pop(task, (None, None))
        if work is not None:
            work.set_result(None)


class _Moving:
    """A transport over the pushes, or the pulls, of a store."""

    def __init__(
        self, store: Any, call: str, details: Callable[[CommTask], tuple[Key, Any, int]]
    ) -> None:
        self._details = details
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
        key, array, priority = self._details(task)
        self._in_flight[task] = done
        # A store counts priorities the other way round.
        self._begin(key, array, partial(self._ended, task), -priority)

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
