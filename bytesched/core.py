"""SchedulerCore: the decisions, as a pure state machine. Events in, tasks to start out.

No thread, clock, lock or I/O. Whoever drives it calls one method per event, on one thread or
under one lock, and hands the returned tasks to a transport in the order given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bytesched.admission import Admission
from bytesched.errors import InvalidTransition
from bytesched.lane import Lane
from bytesched.order import ReadyQueue
from bytesched.task import CommTask, TaskState

__all__ = ["SchedulerCore"]

STORY_EVENTS = 2000


class SchedulerCore:
    """Starts ready hops, in the order of each lane's queue and while its credit lasts.

    A chunk's route is a row of hops: the end of each is a source of its `CommTask.followers`. Where
    one queue is enough, there is one lane, number 0.

    Args:
        queue: the order of lane 0, with its credit and admission.
    """

    def __init__(
        self, queue: ReadyQueue, *, credit_bytes: int, admission: Admission | None = None
    ) -> None:
        #: by the number that hops have in `CommTask.lane`
        self.lanes = [Lane(queue, credit_bytes=credit_bytes, admission=admission)]
        self._stopped = False
        #: how many holds are in force
        self._held = 0
        self._story: deque[tuple[int, str, CommTask]] = deque(maxlen=STORY_EVENTS)
        self._events = 0

    def add_lane(self, lane: Lane) -> int:
        """One more lane; returns its number."""
        lane.is_held = self.is_held
        self.lanes.append(lane)
        return len(self.lanes) - 1

    # -- events ------------------------------------------------------------------------

    def ready(self, task: CommTask) -> list[CommTask]:
        """``task`` has all its sources (its state is READY already)."""
        if task.state is not TaskState.READY:
            raise InvalidTransition(f"ready: {task!r}\n{self.story(task)}")
        self._note("ready", task)
        lane = self.lanes[task.lane]
        lane.queue.add(task)
        if lane.admission is not None:
            lane.admission.ready(task)
        return self._start_next(lane)

    def finish(self, task: CommTask) -> list[CommTask]:
        """The transport is done with ``task``: its credit returns, its followers may start."""
        lane = self._landed(task)
        task.notify_finish()
        self._note("finish", task)
        if lane.admission is not None:
            lane.admission.finished(task)
        started: list[CommTask] = []
        for follower in task.followers:
            if follower.notify_ready():
                started += self.ready(follower)
        if len(lane.queue) or lane.followers:
            started += self._start_next(lane)
        return started

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
        for lane in self.lanes:
            lane.is_held = True

    def release(self) -> list[CommTask]:
        """One `hold` is over; with the last one, what waited starts."""
        if not self._held:
            raise InvalidTransition(f"{self!r} is not held")
        self._held -= 1
        if self._held:
            return []
        for lane in self.lanes:
            lane.is_held = False
        return [task for lane in self.lanes for task in self._start_next(lane)]

    def ordered(self, indices: Sequence[int], lane: int = 0) -> list[CommTask]:
        """The next hops of a lane whose order is given, by index."""
        self.lanes[lane].queue.extend(indices)
        return self._start_next(self.lanes[lane])

    def set_credit(self, credit_bytes: int, lane: int = 0) -> list[CommTask]:
        """A new window; bytes already in flight stay there."""
        self.lanes[lane].set_credit(credit_bytes)
        return self._start_next(self.lanes[lane])

    def yield_to(self, lane: int, lanes: tuple[Lane, ...]) -> list[CommTask]:
        """``lanes``, and no others, go before this one from now on."""
        self.lanes[lane].yield_to(lanes)
        return self._start_next(self.lanes[lane])

    def use_queue(self, queue: ReadyQueue, lane: int = 0) -> None:
        """A new way of ordering, between iterations (nothing ready, nothing in flight)."""
        self._idle(lane, "queue").queue = queue

    def use_admission(self, admission: Admission | None, lane: int = 0) -> None:
        """A new way of admitting, or none beside the credit; between iterations as well."""
        self._idle(lane, "admission").admission = admission

    # -- state -------------------------------------------------------------------------

    @property
    def credit_bytes(self) -> int:
        """Size of the window of lane 0."""
        return self.lanes[0].credit_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes started and not finished."""
        return sum(lane.in_flight_bytes for lane in self.lanes)

    @property
    def is_held(self) -> bool:
        """Whether a `hold` is in force."""
        return self._held > 0

    @property
    def is_held_back(self) -> bool:
        """Whether a hop would start now, were nothing held."""
        return self.is_held and any(lane.is_held_back for lane in self.lanes)

    def held_back(self) -> list[CommTask]:
        """The ready hops while a `hold` is in force; none without one."""
        lanes = self.lanes if self.is_held else []
        return [task for lane in lanes for task in lane.queue.tasks()]

    @property
    def idle(self) -> bool:
        """True if nothing is ready or in flight."""
        return all(lane.is_idle for lane in self.lanes)

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
        for lane in self.lanes:
            lane.validate()
            flying, queued = lane.in_flight.values(), list(lane.queue.tasks())
            assert all(task.state is TaskState.SENDING for task in flying), flying
            assert all(task.state is TaskState.READY for task in queued), queued

    # -- decisions ---------------------------------------------------------------------

    def _start_next(self, lane: Lane) -> list[CommTask]:
        if self._stopped:
            return []
        started = lane.start_next()
        if lane.followers and lane.queue.peek() is None:
            # Its last hop has begun: what goes after it may.
            for follower in lane.followers:
                if len(follower.queue):
                    started += follower.start_next()
        for task in started:
            self._note("start", task)
        return started

    def _landed(self, task: CommTask) -> Lane:
        lane = self.lanes[task.lane]
        if not lane.landed(task):
            raise InvalidTransition(f"{task!r} is not in flight\n{self.story(task)}")
        return lane

    def _idle(self, lane: int, what: str) -> Lane:
        if not self.lanes[lane].is_idle:
            raise InvalidTransition(f"the {what} of {self.lanes[lane]!r} cannot change now")
        return self.lanes[lane]

    def _note(self, event: str, task: CommTask) -> None:
        self._events += 1
        self._story.append((self._events, event, task))

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "held" if self._held else "open"
        return f"<SchedulerCore {state}, {', '.join(map(repr, self.lanes))}>"
