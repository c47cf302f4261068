"""CommTask: one piece of communication, its states, and how it is merged and partitioned."""

from __future__ import annotations

from collections.abc import Sequence
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

    A task covers ``[start, stop)``, in elements of ``itemsize`` bytes, of a flat buffer; its
    *sources* are the tensors that lie in that range. It becomes ready when every source has
    called :meth:`notify_ready`, and it is used again in every iteration (:meth:`rearm`), so that
    an iteration allocates nothing.
    """

    __slots__ = (
        "group",
        "index",
        "is_part",
        "itemsize",
        "members",
        "missing",
        "name",
        "nbytes",
        "parts",
        "priority",
        "start_at",
        "state",
        "stop_at",
    )

    def __init__(
        self, name: str, *, start_at: int, stop_at: int, itemsize: int = 1, priority: int = 0
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
        #: the unmerged, unpartitioned tasks that lie (partly) in this range; itself if alone
        self.members: tuple[CommTask, ...] = (self,)
        self.is_part = False
        #: which of its groups of ranks reduces it; 0: all ranks
        self.group = 0
        self.parts: tuple[CommTask, ...] = ()
        #: sources that have not called notify_ready in this iteration
        self.missing = 1
        self.state = TaskState.WAITING

    @classmethod
    def merge(cls, tasks: Sequence[CommTask]) -> CommTask:
        """One task over neighbours that touch each other in the same buffer."""
        if not tasks:
            raise ValueError("nothing to merge")
        for left, right in pairwise(tasks):
            if left.stop_at != right.start_at or left.itemsize != right.itemsize:
                raise ValueError(f"{left!r} and {right!r} are not neighbours in one buffer")
        if any(task.is_part for task in tasks):
            raise ValueError("merge first, partition then: a part cannot be merged")
        if len(tasks) == 1:
            return tasks[0]
        merged = cls(
            f"{tasks[0].name}..{tasks[-1].name}",
            start_at=tasks[0].start_at,
            stop_at=tasks[-1].stop_at,
            itemsize=tasks[0].itemsize,
            priority=min(task.priority for task in tasks),
        )
        merged.members = tuple(member for task in tasks for member in task.members)
        merged.missing = len(merged.members)
        return merged

    def partition(self, size: int, first: int | None = None) -> tuple[CommTask, ...]:
        """Parts of about ``size`` bytes, cut at any element.

        With ``first``, the first part has about so many bytes, and each one after it twice those
        of its predecessor, up to ``size``: what is needed first is then there first.

        A cut prefers the end of a source, so that a tensor does not wait for a few bytes in the
        next part; every part has between half and twice ``size``. Returns ``(self,)`` if there
        is nothing to cut. A task is partitioned once, before its first source is ready.
        """
        if size < 1:
            raise ValueError(f"partition size must be at least 1 byte, got {size}")
        if self.parts or self.is_part or self.missing != len(self.members):
            raise InvalidTransition(f"cannot partition {self!r}")
        full = max(1, size // self.itemsize)
        step = full if first is None else min(full, max(1, first // self.itemsize))
        cuts = [self.start_at]

        def cut(at: int) -> int:
            cuts.append(at)
            return min(full, 2 * step)

        ends = [member.stop_at for member in self.members]
        for end, following in zip(ends, [*ends[1:], None], strict=True):
            while end - cuts[-1] >= 1.5 * step:
                step = cut(cuts[-1] + step)
            here = end - cuts[-1]
            if here >= 0.75 * step and (
                following is None or following - cuts[-1] - step > abs(step - here)
            ):
                step = cut(end)
        if cuts[-1] != self.stop_at:
            if len(cuts) > 1 and self.stop_at - cuts[-1] < 0.5 * step:
                cuts.pop()
            cuts.append(self.stop_at)
        if len(cuts) == 2:
            return (self,)
        self.parts = tuple(self._part(a, b) for a, b in pairwise(cuts))
        return self.parts

    def _part(self, start_at: int, stop_at: int) -> CommTask:
        members = tuple(m for m in self.members if m.start_at < stop_at and m.stop_at > start_at)
        part = CommTask(
            f"{members[0].name}[{start_at - members[0].start_at}:]"
            if members[0].start_at < start_at
            else members[0].name,
            start_at=start_at,
            stop_at=stop_at,
            itemsize=self.itemsize,
            priority=min(member.priority for member in members),
        )
        part.members = members
        part.missing = len(members)
        part.is_part = True
        return part

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
        self.missing = len(self.members)

    def _on(self, event: TaskEvent) -> None:
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise InvalidTransition(f"{event.value} on {self!r}") from None

    def __repr__(self) -> str:
        waiting = f", {self.missing} sources missing" if self.missing else ""
        return f"<CommTask {self.name} {self.state.value} {self.nbytes} B{waiting}>"
