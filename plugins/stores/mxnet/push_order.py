"""The order of pushes on the workers that worker 0 leads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bytesched.task import CommTask

__all__ = ["Announced"]


class Announced:
    """Ready tasks in the order that worker 0 has announced; one that is not ready is passed over.

    A queue of ready tasks (see order.ReadyQueue).
    """

    def __init__(self) -> None:
        self._announced: list[int] = []
        self._ready: dict[int, CommTask] = {}

    def add(self, task: CommTask) -> None:
        self._ready[task.index] = task

    def pop(self) -> CommTask | None:
        for place, index in enumerate(self._announced):
            if index in self._ready:
                del self._announced[place]
                return self._ready.pop(index)
        return None

    def peek(self) -> CommTask | None:
        return next((self._ready[i] for i in self._announced if i in self._ready), None)

    def extend(self, indices: Sequence[int]) -> None:
        self._announced += indices

    def tasks(self) -> Iterable[CommTask]:
        return self._ready.values()

    def __len__(self) -> int:
        return len(self._ready)
