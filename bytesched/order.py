"""Which of the ready tasks is next: a policy's choice, or a given order.

Collectives must be issued in the same order on every rank, so there all follow the same one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from bytesched.errors import InvalidTransition
from bytesched.policy import Policy
from bytesched.task import CommTask

__all__ = ["Following", "Leading", "ReadyQueue"]


class ReadyQueue(Protocol):
    """Ready tasks, and which of them is next."""

    def add(self, task: CommTask) -> None:
        """``task`` is ready."""

    def pop(self) -> CommTask | None:
        """The next task to start, or None if none may start now."""

    def peek(self) -> CommTask | None:
        """What `pop` would return."""

    def extend(self, indices: Sequence[int]) -> None:
        """The next tasks of the agreed order."""

    def __len__(self) -> int: ...


class Leading:
    """The policy's choice among what is ready here."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, CommTask]] = []
        self._sequence = 0

    def add(self, task: CommTask) -> None:
        # The sequence number is unique, so that the heap never compares two tasks.
        heapq.heappush(self._heap, (self._policy.key(task), self._sequence, task))
        self._sequence += 1

    def pop(self) -> CommTask | None:
        return heapq.heappop(self._heap)[2] if self._heap else None

    def peek(self) -> CommTask | None:
        return self._heap[0][2] if self._heap else None

    def extend(self, indices: Sequence[int]) -> None:
        raise TypeError(f"a policy chooses, and follows no order: {list(indices)}")

    def __len__(self) -> int:
        return len(self._heap)


class Following:
    """A given order; its head waits until it is ready here, and all others wait behind it."""

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._ready: dict[int, CommTask] = {}

    def add(self, task: CommTask) -> None:
        if task.index < 0 or task.index in self._ready:
            raise InvalidTransition(f"{task!r}: index {task.index} is not its own")
        self._ready[task.index] = task

    def pop(self) -> CommTask | None:
        if self._order and self._order[0] in self._ready:
            return self._ready.pop(self._order.popleft())
        return None

    def peek(self) -> CommTask | None:
        return self._ready.get(self._order[0]) if self._order else None

    def extend(self, indices: Sequence[int]) -> None:
        self._order.extend(indices)

    def __len__(self) -> int:
        return len(self._ready)
