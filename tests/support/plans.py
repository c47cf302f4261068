"""Planned tasks, for tests of the core."""

from __future__ import annotations

from collections.abc import Sequence

from bytesched.core import SchedulerCore
from bytesched.task import CommTask


def planned(sizes: Sequence[int], priorities: Sequence[int] | None = None) -> list[CommTask]:
    """Tasks of these sizes in bytes, with their index; priority is the index unless given."""
    tasks = []
    for index, nbytes in enumerate(sizes):
        priority = index if priorities is None else priorities[index]
        tasks.append(CommTask(f"t{index}", start_at=0, stop_at=nbytes, priority=priority))
        tasks[-1].index = index
    return tasks


def ready(core: SchedulerCore, task: CommTask) -> list[CommTask]:
    """Tells `core` that `task`, which has one source, is ready; what it starts."""
    assert task.notify_ready()
    return core.ready(task)
