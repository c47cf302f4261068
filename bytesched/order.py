"""One order on all ranks: the leader's choice, following it, and learning one to replay.

Collectives must be issued in the same order on every rank. Rank 0 leads: it picks by policy
among *its* ready tasks and announces them; the others follow. An order that has converged can be
replayed by all without messages. All of it is pure: what is sent, and how, is the plugin's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from bytesched.errors import InvalidTransition
from bytesched.policy import Policy
from bytesched.task import CommTask

__all__ = ["Following", "Leading", "OrderLearner", "ReadyQueue"]


class ReadyQueue(Protocol):
    """Ready tasks, and which of them is next."""

    def add(self, task: CommTask) -> None:
        """``task`` is ready."""

    def pop(self) -> CommTask | None:
        """The next task to start, or None if none may start now."""

    def extend(self, indices: Sequence[int]) -> None:
        """The next tasks of the agreed order."""

    def tasks(self) -> Iterable[CommTask]:
        """The ready tasks, in no order."""

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

    def waiting(self) -> list[int]:
        """The indices of the ready tasks, in the order in which they are next."""
        return [task.index for _, _, task in sorted(self._heap)]

    def extend(self, indices: Sequence[int]) -> None:
        raise TypeError(f"the leader chooses, and follows no order: {list(indices)}")

    def tasks(self) -> Iterator[CommTask]:
        return (task for _, _, task in self._heap)

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

    def extend(self, indices: Sequence[int]) -> None:
        self._order.extend(indices)

    @property
    def blocked_on(self) -> int | None:
        """Index of the head that is not ready here while others are, if that is so."""
        if self._ready and self._order and self._order[0] not in self._ready:
            return self._order[0]
        return None

    def tasks(self) -> Iterable[CommTask]:
        return self._ready.values()

    def __len__(self) -> int:
        return len(self._ready)


class OrderLearner:
    """Learns from the leader's choices of several iterations an order worth replaying.

    The order is by mean position over the last ``window`` iterations: one iteration is too
    little (it cost 10 % on one shape of three). It has *converged* when no task strays from its
    mean position by more than ``tolerance`` places.
    """

    def __init__(self, *, window: int = 5, tolerance: float = 4.0) -> None:
        self._seen: deque[list[int]] = deque(maxlen=window)
        self._tolerance = tolerance

    def observe(self, order: Sequence[int]) -> None:
        """The order in which one whole iteration was started; ValueError if it is not whole."""
        if sorted(order) != list(range(len(order))):
            raise ValueError(f"not every task once: {list(order)}")
        if self._seen and len(order) != len(self._seen[-1]):
            self._seen.clear()
        position = [0] * len(order)
        for place, index in enumerate(order):
            position[index] = place
        self._seen.append(position)

    def converged(self) -> list[int] | None:
        """The order to replay, or None while it has not converged."""
        if len(self._seen) < (self._seen.maxlen or 1):
            return None
        columns = list(zip(*self._seen, strict=True))
        means = [sum(column) / len(column) for column in columns]
        strayed = max(
            (abs(p - mean) for column, mean in zip(columns, means, strict=True) for p in column),
            default=0.0,
        )
        if strayed > self._tolerance:
            return None
        return sorted(range(len(means)), key=lambda index: (means[index], index))
