"""Scheduler: drives a SchedulerCore against a transport, one event at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from time import perf_counter_ns, thread_time_ns
from typing import Final, Protocol

from bytesched.busy import Busy
from bytesched.core import SchedulerCore
from bytesched.errors import SchedulerClosed
from bytesched.observe import Observers
from bytesched.task import CommTask

__all__ = ["Done", "EventThread", "Scheduler", "Transport"]

log = logging.getLogger("bytesched")

#: One thing for a scheduler to do; returns the tasks to start.
_Event = Callable[[], Sequence[CommTask]]
_CLOSE: Final = None
#: Called once per started task, from any thread, with the error that ended it, if one did.
Done = Callable[[CommTask, BaseException | None], None]
#: for a hold that another thread has to handle, as it is handling something at the moment
_HELD_WITHIN_S: Final = 0.05


class Transport(Protocol):
    """What moves a task's bytes. Calls of ``start`` follow one another, on any threads."""

    def start(self, task: CommTask, done: Done) -> None:
        """Begins to send ``task``, in call order, and returns without waiting for the peer.

        ``done`` is called exactly once, also when it fails. An exception raised here counts as
        the failure of ``task``; ``done`` is then not called.
        """

    def close(self) -> None:
        """Releases everything; tasks in flight fail. Idempotent."""


class EventThread:
    """Handles events one by one, in the order in which they were put, on a thread of its own.

    Several schedulers may share one.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[tuple[Callable[[_Event], None], _Event] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bytesched-scheduler", daemon=True)
        self._thread.start()

    def put(self, handle: Callable[[_Event], None], event: _Event) -> None:
        """Calls ``handle(event)``, which raises nothing, after those that were put before."""
        self._inbox.put((handle, event))

    def close(self) -> None:
        """No event is handled after those that are there."""
        self._inbox.put(_CLOSE)

    def join(self, timeout_s: float) -> bool:
        """Waits for the last one; false if that has not come. Inside a handler, true at once."""
        if threading.current_thread() is self._thread:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._inbox.get()) is not _CLOSE:
            handle, event = item
            handle(event)


class Scheduler:
    """Feeds events to the core and starts what it returns, one event at a time.

    Args:
        core: the decisions.
        transport: what sends; its ``start`` is called where events are handled.
        announce: called with the tasks that start now, before they do (MXNet's worker 0 tells the
            others).
        on_finish: called there for every finished task, which is re-armed already.
        on_error: called once, with the first error; nothing is started after it.
        observers: of queue and send spans.
        events: where they are handled, shared with other schedulers, all of which are closed
            together; a thread of its own if None.
    """

    def __init__(
        self,
        core: SchedulerCore,
        transport: Transport,
        *,
        announce: Callable[[Sequence[CommTask]], None] | None = None,
        on_finish: Callable[[CommTask], None] = lambda task: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
        observers: Observers | None = None,
        events: EventThread | None = None,
    ) -> None:
        self.core = core
        self._transport = transport
        self._announce = announce
        self._on_finish = on_finish
        self._on_error = on_error
        self._observers = Observers() if observers is None else observers
        #: when each task, by index, became ready last
        self.ready_at_ns: dict[int, int] = {}
        self._started_at: dict[int, int] = {}
        self._busy = Busy()
        self._closed = False
        #: the first error, which is final
        self.error: BaseException | None = None
        #: totals since the start
        self.tasks_started = 0
        self.cpu_ns = 0
        #: time in which a task did not start for a hold; since when one does not, or 0
        self.held_ns = 0
        self._held_since_ns = 0
        self._is_held = False
        self._events = EventThread() if events is None else events

    @property
    def busy_ns(self) -> int:
        """Time in which some task was under way."""
        return self._busy.total_ns

    # -- any thread --------------------------------------------------------------------

    def notify_ready(self, task: CommTask) -> None:
        """``task`` has become READY."""
        self.ready_at_ns[task.index] = perf_counter_ns()
        self._events.put(self._handle, partial(self.core.ready, task))

    def ordered(self, indices: Sequence[int]) -> None:
        """The next tasks of the agreed order, by index."""
        self._put(lambda: self.core.ordered(indices))

    def hold(self) -> None:
        """Until `release`, nothing starts.

        That is so when this returns, unless another thread is in the middle of a slow event: then
        from the end of that on.
        """
        in_force = threading.Event()

        def hold() -> Sequence[CommTask]:
            self._is_held = True
            self.core.hold()
            in_force.set()
            return ()

        self._put(hold)
        if not self._closed:
            in_force.wait(_HELD_WITHIN_S)

    def release(self) -> None:
        """The `hold` is over."""

        def release() -> Sequence[CommTask]:
            self._is_held = False
            self._look_held(is_held_back=False)
            return self.core.release()

        self._put(release)

    def _put(self, event: _Event) -> None:
        self._events.put(self._handle, event)

    def close(self, timeout_s: float = 5.0) -> None:
        """Handles what was put before, and closes the transport. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._events.close()
        has_ended = self._events.join(timeout_s)
        self._transport.close()
        if not has_ended and not self._events.join(timeout_s):
            log.warning("%r did not stop within %g s", self, 2 * timeout_s)

    # -- where events are handled ------------------------------------------------------

    def _handle(self, event: _Event) -> None:
        began_ns = thread_time_ns()
        try:
            self._start(event(), began_ns)
        except BaseException as error:  # noqa: BLE001 - it must reach the user's thread
            self._give_up(error)
        if self._is_held:
            self._look_held(is_held_back=self.core.is_held_back)

    def _look_held(self, *, is_held_back: bool) -> None:
        if is_held_back is bool(self._held_since_ns):
            return
        now_ns = perf_counter_ns()
        if is_held_back:
            self._held_since_ns = now_ns
        else:
            self.held_ns += now_ns - self._held_since_ns
            self._held_since_ns = 0

    def _start(self, tasks: Sequence[CommTask], began_ns: int) -> None:
        if not tasks:
            self.cpu_ns += thread_time_ns() - began_ns
            return
        if self._announce is not None:
            self._announce(tasks)
        now_ns = perf_counter_ns()
        for task in tasks:
            self._busy.begins(now_ns)
            self._started_at[task.index] = now_ns
            self.tasks_started += 1
        self.cpu_ns += thread_time_ns() - began_ns
        for task in tasks:
            try:
                self._transport.start(task, self._done)
            except BaseException:
                self.core.fail(task)
                raise
        if self._observers.are_any:
            self._trace_start(tasks, now_ns)

    def _done(self, task: CommTask, error: BaseException | None) -> None:
        """Called by the transport, on any thread."""
        event = partial(self._finish, task) if error is None else partial(self._fail, task, error)
        self._events.put(self._handle, event)

    def _finish(self, task: CommTask) -> Sequence[CommTask]:
        now_ns = perf_counter_ns()
        following = self.core.finish(task)
        started_ns = self._started_at.pop(task.index)
        self._busy.ends(now_ns)
        task.rearm()
        self._on_finish(task)
        if self._observers.are_any:
            args = {"bytes": task.nbytes, "chunk": task.index}
            self._observers.on_span("send", task.name, started_ns, now_ns, args)
        return following

    def _fail(self, task: CommTask, error: BaseException) -> Sequence[CommTask]:
        self.core.fail(task)
        self._give_up(error)
        return ()

    def _give_up(self, error: BaseException) -> None:
        self.core.stop()
        if self.error is not None or (self._closed and isinstance(error, SchedulerClosed)):
            return
        self.error = error
        try:
            self._on_error(error)
        except Exception:
            log.exception("%r could not report %r", self, error)

    def _trace_start(self, tasks: Sequence[CommTask], now_ns: int) -> None:
        for task in tasks:
            ready_ns = self.ready_at_ns.get(task.index, now_ns)
            self._observers.on_span("queue", task.name, ready_ns, now_ns, {"chunk": task.index})

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self.error else "running"
        return f"<Scheduler {state}, {self.tasks_started} started, {self.core!r}>"
