"""SchedulerCore: the decisions, as a pure state machine. Events in, tasks to start out.

No thread, clock, lock or I/O. Whoever drives it calls one method per event, on one thread or
under one lock, and hands the returned tasks to a transport in the order given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bytesched.admission import Foreseen
from bytesched.errors import InvalidTransition
from bytesched.order import ReadyQueue
from bytesched.task import CommTask, TaskState

__all__ = ["SchedulerCore"]

STORY_EVENTS = 2000


class SchedulerCore:
    """Starts ready tasks, in the order of its queue and while its credit lasts.

    A task starts as long as fewer than ``credit_bytes`` are in flight, so at most ``credit_bytes``
    plus one task are (ByteScheduler's rule, counted in bytes). With an ``admission`` more may start
    at such a moment, in one block.

    Args:
        queue: which of the ready tasks is next.
    """

    def __init__(
        self, queue: ReadyQueue, *, credit_bytes: int, admission: Foreseen | None = None
    ) -> None:
        self._queue = queue
        self._admission = admission
        #: size of the window
        if credit_bytes < 1:
            raise ValueError(f"credit must be at least 1 byte, got {credit_bytes}")
        self.credit_bytes = credit_bytes
        self._in_flight: dict[int, CommTask] = {}
        #: bytes started and not finished
        self.in_flight_bytes = 0
        self._stopped = False
        #: how many holds are in force
        self._held = 0
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
        """The transport is done with ``task``: its credit returns."""
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

    def hold(self) -> None:
        """Until as many calls of `release`, nothing starts; what is in flight goes on."""
        self._held += 1

    def release(self) -> list[CommTask]:
        """One `hold` is over; with the last one, what waited starts."""
        if not self._held:
            raise InvalidTransition(f"{self!r} is not held")
        self._held -= 1
        return self._start_next()

    def ordered(self, indices: Sequence[int]) -> list[CommTask]:
        """The next tasks where their order is given, by index."""
        self._queue.extend(indices)
        return self._start_next()

    # -- state -------------------------------------------------------------------------

    @property
    def is_held_back(self) -> bool:
        """Whether a task would start now, were nothing held."""
        has_room = self.in_flight_bytes < self.credit_bytes
        return bool(self._held) and has_room and self._queue.peek() is not None

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

    # -- decisions ---------------------------------------------------------------------

    def _start_next(self) -> list[CommTask]:
        """The tasks that start now, in this order; they are in flight from here on."""
        started: list[CommTask] = []
        window_bytes = self.credit_bytes
        if self._stopped or self._held or self.in_flight_bytes >= window_bytes:
            return started
        if self._admission is not None:
            window_bytes = max(window_bytes, self._admission.block_bytes(window_bytes))
        while self.in_flight_bytes < window_bytes:
            task = self._queue.pop()
            if task is None:
                break
            task.start()
            if self._admission is not None:
                self._admission.started(task)
            self._in_flight[id(task)] = task
            self.in_flight_bytes += task.nbytes
            self._note("start", task)
            started.append(task)
        return started

    def _landed(self, task: CommTask) -> None:
        """``task`` is over, well or not."""
        if self._in_flight.pop(id(task), None) is None:
            raise InvalidTransition(f"{task!r} is not in flight\n{self.story(task)}")
        self.in_flight_bytes -= task.nbytes

    def _note(self, event: str, task: CommTask) -> None:
        self._events += 1
        self._story.append((self._events, event, task))

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "held" if self._held else "open"
        return (
            f"<SchedulerCore {state}, {len(self._queue)} ready, {len(self._in_flight)} sending, "
            f"{self.in_flight_bytes / 2**20:.2f}/{self.credit_bytes / 2**20:.2f} MiB credit>"
        )
