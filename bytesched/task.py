"""CommTask: one piece of communication, its states, and how it is cut into parts."""

from __future__ import annotations

from enum import Enum
from itertools import pairwise

from bytesched.errors import InvalidTransition

__all__ = ["TRANSITIONS", "CommTask", "TaskEvent", "TaskState"]


class TaskState(Enum):
    """Where a task stands within one iteration."""

    #: some of its sources (gradients, or a key's value) are not there yet
    WAITING = "waiting"
    #: all sources are there; queued for its turn
    READY = "ready"
    #: handed to the transport; its bytes count against the credit
    SENDING = "sending"
    #: the transport reported completion
    DONE = "done"
    #: the transport reported an error; final until the plan is rebuilt
    FAILED = "failed"

    # That of Enum is written in Python, and asked for at every transition.
    __hash__ = object.__hash__


class TaskEvent(Enum):
    """What can happen to a task."""

    NOTIFY_READY = "notify_ready"
    START = "start"
    NOTIFY_FINISH = "notify_finish"
    FAIL = "fail"
    REARM = "rearm"

    __hash__ = object.__hash__


#: The whole life of a task. A pair that is not listed is an InvalidTransition.
TRANSITIONS: dict[tuple[TaskState, TaskEvent], TaskState] = {
    (TaskState.WAITING, TaskEvent.NOTIFY_READY): TaskState.READY,
    (TaskState.READY, TaskEvent.START): TaskState.SENDING,
    (TaskState.SENDING, TaskEvent.NOTIFY_FINISH): TaskState.DONE,
    (TaskState.DONE, TaskEvent.REARM): TaskState.WAITING,
    (TaskState.WAITING, TaskEvent.FAIL): TaskState.FAILED,
    (TaskState.READY, TaskEvent.FAIL): TaskState.FAILED,
    (TaskState.SENDING, TaskEvent.FAIL): TaskState.FAILED,
}


class CommTask:
    """A contiguous range of one buffer that is sent as a whole.

    A task covers ``[start, stop)``, in elements of ``itemsize`` bytes, of a flat buffer. It becomes
    ready when each of its ``sources`` has called :meth:`notify_ready`, and it is used again in
    every iteration (:meth:`rearm`), so that an iteration allocates nothing.
    """

    __slots__ = (
        "group",
        "index",
        "itemsize",
        "missing",
        "name",
        "nbytes",
        "priority",
        "sources",
        "start_at",
        "state",
        "stop_at",
    )

    def __init__(
        self,
        name: str,
        *,
        start_at: int,
        stop_at: int,
        itemsize: int = 1,
        priority: int = 0,
        sources: int = 1,
    ) -> None:
        if stop_at <= start_at or start_at < 0 or itemsize < 1:
            raise ValueError(
                f"task {name!r}: empty or negative range [{start_at}, {stop_at}) x {itemsize} bytes"
            )
        self.name = name
        #: lower runs first
        self.priority = priority
        self.start_at = start_at
        self.stop_at = stop_at
        self.itemsize = itemsize
        #: size on the wire before compression
        self.nbytes = (stop_at - start_at) * itemsize
        #: position in the plan, the same on all ranks; -1 until planned
        self.index = -1
        #: which of its groups of ranks reduces it; 0: all ranks
        self.group = 0
        #: how often it is told, in each iteration, that something of it is ready
        self.sources = sources
        #: sources that have not called notify_ready in this iteration
        self.missing = sources
        self.state = TaskState.WAITING

    def partition(self, size: int) -> tuple[CommTask, ...]:
        """Parts of ``size`` bytes; the last one has between half and one and a half times as many.

        Returns ``(self,)`` if there is nothing to cut.
        """
        if size < 1:
            raise ValueError(f"partition size must be at least 1 byte, got {size}")
        step = max(1, size // self.itemsize)
        cuts = [self.start_at]
        while self.stop_at - cuts[-1] >= 1.5 * step:
            cuts.append(cuts[-1] + step)
        if len(cuts) == 1:
            return (self,)
        cuts.append(self.stop_at)
        return tuple(
            CommTask(
                f"{self.name}[{start - self.start_at}:]" if start > self.start_at else self.name,
                start_at=start,
                stop_at=stop,
                itemsize=self.itemsize,
                priority=self.priority,
            )
            for start, stop in pairwise(cuts)
        )

    def notify_ready(self) -> bool:
        """One more source is there; True if that was the last one and the task is READY."""
        if self.missing < 1:
            raise InvalidTransition(f"{self!r} has all its sources already")
        self.missing -= 1
        if self.missing:
            return False
        self._on(TaskEvent.NOTIFY_READY)
        return True

    def start(self) -> None:
        """The transport has it now."""
        self._on(TaskEvent.START)

    def notify_finish(self) -> None:
        """It is done."""
        self._on(TaskEvent.NOTIFY_FINISH)

    def fail(self) -> None:
        """It will not be done."""
        self._on(TaskEvent.FAIL)

    def rearm(self) -> None:
        """Back to WAITING for the next iteration."""
        self._on(TaskEvent.REARM)
        self.missing = self.sources

    def _on(self, event: TaskEvent) -> None:
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise InvalidTransition(f"{event.value} on {self!r}") from None

    def __repr__(self) -> str:
        waiting = f", {self.missing} sources missing" if self.missing else ""
        return f"<CommTask {self.name} {self.state.value} {self.nbytes} B{waiting}>"
