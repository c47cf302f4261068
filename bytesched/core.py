"""SchedulerCore: the decisions, as a pure state machine. Events in, tasks to start out.

No thread, clock, lock or I/O. Whoever drives it calls one method per event, on one thread or
under one lock, and hands the returned tasks to a transport in the order given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bytesched.admission import Admission
from bytesched.errors import InvalidTransition
from bytesched.order import ReadyQueue
from bytesched.task import CommTask, TaskState

__all__ = ["SchedulerCore"]

STORY_EVENTS = 2000


class SchedulerCore:
    """Starts ready tasks in the order of its queue while credit lasts.

    A task is started as long as fewer than ``credit_bytes`` are in flight, so at most
    ``credit_bytes`` plus one task are (ByteScheduler's rule, counted in bytes). With an
    ``admission`` more may start at such a moment, in one block.
    """

    def __init__(
        self, queue: ReadyQueue, *, credit_bytes: int, admission: Admission | None = None
    ) -> None:
        self._queue = queue
        self._admission = admission
        self._credit_bytes = _checked(credit_bytes)
        self._in_flight: dict[int, CommTask] = {}
        self._in_flight_bytes = 0
        #: bytes in flight and window just before the latest start
        self._last_start = (0, self._credit_bytes)
        self._stopped = False
        self._story: deque[tuple[int, str, CommTask]] = deque(maxlen=STORY_EVENTS)
        self._events = 0

    # -- events ------------------------------------------------------------------------

    def ready(self, task: CommTask) -> list[CommTask]:
        """``task`` has all its sources (its state is READY already)."""
        if task.state is not TaskState.READY:
            raise InvalidTransition(f"ready: {task!r}\n{self.story(task)}")
        self._note("ready", task)
        self._queue.add(task)
        if self._admission is not None:
            self._admission.ready(task)
        return self._start_next()

    def finish(self, task: CommTask) -> list[CommTask]:
        """The transport is done with ``task``; its credit returns."""
        self._landed(task)
        task.notify_finish()
        self._note("finish", task)
        if self._admission is not None:
            self._admission.finished(task)
        return self._start_next()

    def fail(self, task: CommTask) -> None:
        """The transport gave ``task`` up; nothing is started any more."""
        self._landed(task)
        task.fail()
        self._note("fail", task)
        self.stop()

    def stop(self) -> None:
        """Nothing is started any more; what is in flight may still finish."""
        self._stopped = True

    def ordered(self, indices: Sequence[int]) -> list[CommTask]:
        """The leader's next tasks, by index (followers and replay only)."""
        self._queue.extend(indices)
        return self._start_next()

    def set_credit(self, credit_bytes: int) -> list[CommTask]:
        """A new window; bytes already in flight stay there."""
        self._credit_bytes = _checked(credit_bytes)
        return self._start_next()

    def use_queue(self, queue: ReadyQueue) -> None:
        """A new way of ordering, between iterations (nothing ready, nothing in flight)."""
        if len(self._queue) or self._in_flight:
            raise InvalidTransition(f"the queue of {self!r} cannot change now")
        self._queue = queue

    def use_admission(self, admission: Admission | None) -> None:
        """A new way of admitting, or none beside the credit; between iterations as well."""
        if len(self._queue) or self._in_flight:
            raise InvalidTransition(f"the admission of {self!r} cannot change now")
        self._admission = admission

    # -- state -------------------------------------------------------------------------

    @property
    def credit_bytes(self) -> int:
        """Size of the window."""
        return self._credit_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes started and not finished."""
        return self._in_flight_bytes

    @property
    def idle(self) -> bool:
        """True if nothing is ready or in flight."""
        return not self._in_flight and not len(self._queue)

    def story(self, task: CommTask | None = None) -> str:
        """The last transitions, of one task or of all, one line each."""
        lines = [
            f"  {number:>6} {event:<7} {noted.name}"
            for number, event, noted in self._story
            if task is None or noted is task
        ]
        return "\n".join(lines[-20:]) or "  (no events)"

    def validate(self) -> None:
        """Raises AssertionError unless every invariant holds."""
        flying = list(self._in_flight.values())
        assert all(task.state is TaskState.SENDING for task in flying), flying
        assert self._in_flight_bytes == sum(task.nbytes for task in flying)
        before_bytes, window_bytes = self._last_start
        assert before_bytes < window_bytes, repr(self)
        if flying:
            assert self._in_flight_bytes <= before_bytes + flying[-1].nbytes, repr(self)
        queued = list(self._queue.tasks())
        assert all(task.state is TaskState.READY for task in queued), queued
        assert len({id(task) for task in queued}) == len(queued)
        assert not {id(task) for task in queued} & self._in_flight.keys()

    # -- decisions ---------------------------------------------------------------------

    def _start_next(self) -> list[CommTask]:
        started: list[CommTask] = []
        window_bytes = self._credit_bytes
        if self._admission is not None and self._in_flight_bytes < window_bytes:
            window_bytes = max(window_bytes, self._admission.block_bytes(window_bytes))
        while self._in_flight_bytes < window_bytes and not self._stopped:
            task = self._queue.pop()
            if task is None:
                break
            task.start()
            if self._admission is not None:
                self._admission.started(task)
            self._last_start = (self._in_flight_bytes, window_bytes)
            self._in_flight[id(task)] = task
            self._in_flight_bytes += task.nbytes
            self._note("start", task)
            started.append(task)
        return started

    def _landed(self, task: CommTask) -> None:
        if self._in_flight.pop(id(task), None) is None:
            raise InvalidTransition(f"{task!r} is not in flight\n{self.story(task)}")
        self._in_flight_bytes -= task.nbytes

    def _note(self, event: str, task: CommTask) -> None:
        self._events += 1
        self._story.append((self._events, event, task))

    def __repr__(self) -> str:
        return (
            f"<SchedulerCore {len(self._queue)} ready, {len(self._in_flight)} sending, "
            f"{self._in_flight_bytes / 2**20:.2f}/{self._credit_bytes / 2**20:.2f} MiB credit>"
        )


def _checked(credit_bytes: int) -> int:
    if credit_bytes < 1:
        raise ValueError(f"credit must be at least 1 byte, got {credit_bytes}")
    return credit_bytes
