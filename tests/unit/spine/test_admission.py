"""Foreseen: a block is what fits before the next release, as earlier iterations had it."""

from __future__ import annotations

import pytest
from plans import planned

from bytesched.admission import Foreseen
from bytesched.core import SchedulerCore
from bytesched.order import Leading
from bytesched.policy import Priority
from bytesched.task import CommTask

CREDIT = 20
MOST = 4 * CREDIT


class Link:
    """A core whose tasks are released when told, over a link of 10 bytes a second."""

    def __init__(self, tasks: int = 12) -> None:
        self.now_s = 0.0
        self.tasks = planned([10] * tasks)
        self.foreseen = Foreseen(tasks, lambda: self.now_s)
        self.core = SchedulerCore(Leading(Priority()), credit_bytes=CREDIT, admission=self.foreseen)
        self.flying: list[CommTask] = []
        self.blocks: list[int] = []

    def release(self, *indices: int) -> None:
        for index in indices:
            assert self.tasks[index].notify_ready()
            self._started(self.core.ready(self.tasks[index]))

    def arrive(self, count: int) -> None:
        """So many tasks arrive, one a second."""
        for _ in range(count):
            self.now_s += 1.0
            task = self.flying.pop(0)
            self._started(self.core.finish(task))
            task.rearm()

    def _started(self, tasks: list[CommTask]) -> None:
        self.flying += tasks
        if tasks:
            self.blocks.append(len(tasks))

    def iteration(self, gap_s: float = 100.0) -> None:
        """Half of the tasks are released at once, and after ``gap_s`` the rest."""
        began_s = self.now_s
        half = len(self.tasks) // 2
        self.release(*range(half, 2 * half))
        self.arrive(half)
        self.now_s = max(self.now_s, began_s + gap_s)
        self.release(*range(half))
        self.arrive(half)


def test_until_some_iterations_are_over_the_credit_holds() -> None:
    link = Link()
    for _ in range(3):
        link.iteration()
    assert set(link.blocks) == {1}


def test_what_fits_before_the_next_release_starts_at_once() -> None:
    link = Link()
    for _ in range(4):
        link.blocks.clear()
        link.iteration()
    # Two by the credit as they come, then a block when one of them has arrived.
    assert link.blocks[:3] == [1, 1, 4]
    assert sum(link.blocks) == 12


@pytest.mark.parametrize(
    ("gaps_s", "later_s", "block"),
    [
        # 4 s are left, of which one is kept for the task that may exceed the block.
        pytest.param([6.0] * 3, 2.0, 30, id="what does not fit waits for what is more urgent"),
        pytest.param([6.0] * 3, 50.0, CREDIT, id="a release that is late leaves the credit"),
        pytest.param([100.0, 6.0, 100.0], 0.0, 50, id="the soonest of the last ones counts"),
    ],
)
def test_a_block_is_what_fits(gaps_s: list[float], later_s: float, block: int) -> None:
    link = Link()
    for gap_s in gaps_s:
        link.iteration(gap_s)
    link.release(*range(6, 12))
    link.now_s += later_s
    assert link.foreseen.block_bytes(CREDIT) == block


def test_when_all_are_released_only_the_size_of_a_block_is_limited() -> None:
    link = Link(tasks=24)
    for _ in range(3):
        link.iteration()
    link.blocks.clear()
    link.iteration()
    assert max(link.blocks) == MOST // 10 - 1, "one of the credit was still on its way"
