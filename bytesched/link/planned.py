"""An order that all ranks keep to, planned of what all have measured.

Rank 0, when it leads, takes the most urgent of what is ready on rank 0, and all wait for the rank
on which that is not. A plan is made of what is ready on the slowest rank: each rank measures when
its tasks become ready and how fast the link carries them, and of the largest numbers of all, the
scheduler's core makes the order in which a rank would start them if all were alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from bytesched.core import SchedulerCore
from bytesched.course import LED_ROUNDS
from bytesched.errors import InvalidTransition
from bytesched.link.simulation import LinkTransport, ManualClock
from bytesched.order import Leading
from bytesched.policy import Policy
from bytesched.task import CommTask

__all__ = ["Measured", "planned_order"]


class Measured:
    """What one rank measures in the last `course.LED_ROUNDS` rounds."""

    def __init__(self) -> None:
        self._ready_ns: deque[list[int]] = deque(maxlen=LED_ROUNDS)
        self._bytes_per_s: deque[int] = deque(maxlen=LED_ROUNDS)

    def round_ends(self, ready_ns: Sequence[int], *, nbytes: int, busy_ns: int) -> None:
        """Every task of a round is over.

        Args:
            ready_ns: when each task has become ready, after any one moment.
            nbytes: of all of them.
            busy_ns: how long at least one was under way.
        """
        first_ns = min(ready_ns)
        self._ready_ns.append([at_ns - first_ns for at_ns in ready_ns])
        self._bytes_per_s.append(nbytes * 10**9 // max(busy_ns, 1))

    def numbers(self) -> list[int]:
        """What `planned_order` needs of each rank, always as many.

        The rate of each round, which is that of the link on the rank that was last to start most
        tasks, and too low on the others; and of each task, its median time.

        Raises InvalidTransition if too few rounds have ended.
        """
        if len(self._ready_ns) < LED_ROUNDS:
            raise InvalidTransition(f"{self!r}: {LED_ROUNDS} rounds make a median")
        columns = zip(*self._ready_ns, strict=True)
        return [*self._bytes_per_s, *(_median(column) for column in columns)]

    def __repr__(self) -> str:
        return f"<Measured {len(self._ready_ns)} rounds, {list(self._bytes_per_s)} bytes/s>"


def planned_order(
    tasks: Sequence[CommTask], numbers: Sequence[int], policy: Policy, *, credit_bytes: int
) -> list[int]:
    """The indices of ``tasks`` in the order in which they start if all ranks are alike.

    Args:
        tasks: those of a round, each with its place as its index; they are left as they are.
        numbers: the largest of all ranks, of each that `Measured.numbers` returns.
    """
    clock = ManualClock()
    link = LinkTransport(clock, bytes_per_s=_median(numbers[:LED_ROUNDS]))
    core = SchedulerCore(Leading(policy), credit_bytes=credit_bytes)
    order: list[int] = []

    def start(started: Sequence[CommTask]) -> None:
        for task in started:
            order.append(task.index)
            link.start(task, lambda task, _: start(core.finish(task)))

    def ready(task: CommTask) -> None:
        task.notify_ready()
        start(core.ready(task))

    for task, at_ns in zip(map(_copied, tasks), numbers[LED_ROUNDS:], strict=True):
        clock.call_at(at_ns / 1e9, partial(ready, task))
    clock.run()
    return order


def _median(numbers: Sequence[int]) -> int:
    return sorted(numbers)[len(numbers) // 2]


def _copied(task: CommTask) -> CommTask:
    copy = CommTask(
        task.name,
        start_at=task.start_at,
        stop_at=task.stop_at,
        itemsize=task.itemsize,
        priority=task.priority,
    )
    copy.index = task.index
    copy.members = task.members
    return copy
