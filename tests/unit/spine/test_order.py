"""One order on all ranks, and a policy's choice."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import planned

from bytesched.core import SchedulerCore
from bytesched.errors import InvalidTransition
from bytesched.order import Following, Leading
from bytesched.policy import Priority
from bytesched.task import CommTask


class Ranks:
    """Ranks of one job without processes: a collective ends once every rank has issued it."""

    def __init__(self, sizes: Sequence[int], credits: Sequence[int]) -> None:
        self.plans = [planned(sizes) for _ in credits]
        self.cores = [
            SchedulerCore(Following(), credit_bytes=credit_bytes) for credit_bytes in credits
        ]
        #: indices that each rank has issued, in order, over all iterations
        self.issued: list[list[int]] = [[] for _ in credits]
        #: how many of them have ended on each rank; a group ends its collectives in order
        self.ended = [0] * len(credits)

    def issue(self, rank: int, started: Sequence[CommTask]) -> None:
        self.issued[rank] += [task.index for task in started]

    def possible(self, todo: Sequence[Sequence[CommTask]]) -> list[tuple[str, int]]:
        """What may happen next: a task becomes ready, a collective ends."""
        everywhere = min(len(issued) for issued in self.issued)
        ready = [("ready", rank) for rank, tasks in enumerate(todo) if tasks]
        return ready + [
            ("end", rank) for rank, ended in enumerate(self.ended) if ended < everywhere
        ]

    def iterate(self, chance: random.Random, order: Sequence[int]) -> None:
        """One whole iteration, its events in an order drawn by `chance`."""
        todo = [chance.sample(tasks, len(tasks)) for tasks in self.plans]
        for rank, core in enumerate(self.cores):
            self.issue(rank, core.ordered(order))
        while events := self.possible(todo):
            event, rank = chance.choice(events)
            core = self.cores[rank]
            if event == "ready":
                task = todo[rank].pop()
                task.notify_ready()
                self.issue(rank, core.ready(task))
            else:
                task = self.plans[rank][self.issued[rank][self.ended[rank]]]
                self.ended[rank] += 1
                self.issue(rank, core.finish(task))
                task.rearm()
            core.validate()


jobs = {
    "sizes": st.lists(st.integers(1, 50), min_size=1, max_size=12),
    "credits": st.lists(st.integers(1, 120), min_size=2, max_size=5),
    "seed": st.integers(0, 2**32),
}


@settings(max_examples=150)
@given(**jobs)
def test_an_order_is_kept_and_drains(sizes: list[int], credits: list[int], seed: int) -> None:
    ranks, chance = Ranks(sizes, credits), random.Random(seed)
    order = chance.sample(range(len(sizes)), len(sizes))
    for _ in range(3):
        ranks.iterate(chance, order)
        assert all(core.idle for core in ranks.cores), ranks.cores
    assert all(issued == order * 3 for issued in ranks.issued)


def test_a_follower_waits_for_the_head_of_the_order() -> None:
    queue, (a, b, c) = Following(), planned([1, 1, 1])
    queue.add(b)
    assert queue.pop() is None, "no order yet"
    queue.extend([0, 1])
    assert queue.pop() is None, "0 comes first and is not ready here"
    queue.add(a)
    assert [queue.pop(), queue.pop(), queue.pop()] == [a, b, None]
    queue.add(c)
    assert list(queue.tasks()) == [c]
    assert len(queue) == 1


def test_an_index_belongs_to_one_ready_task() -> None:
    queue, (a, b) = Following(), planned([1, 1])
    queue.add(a)
    for index in (0, -1):
        b.index = index
        with pytest.raises(InvalidTransition, match="index"):
            queue.add(b)
    assert list(queue.tasks()) == [a]


def test_a_policy_follows_no_order() -> None:
    with pytest.raises(TypeError, match="policy"):
        Leading(Priority()).extend([0])
