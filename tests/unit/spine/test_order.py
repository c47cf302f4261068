"""One order on all ranks: leading, following, and replaying."""

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

    def __init__(self, sizes: Sequence[int], credits: Sequence[int], *, replay: bool) -> None:
        self.plans = [planned(sizes) for _ in credits]
        self.cores = [
            SchedulerCore(
                Leading(Priority()) if rank == 0 and not replay else Following(),
                credit_bytes=credit_bytes,
            )
            for rank, credit_bytes in enumerate(credits)
        ]
        #: indices that each rank has issued, in order, over all iterations
        self.issued: list[list[int]] = [[] for _ in credits]
        #: how many of them have ended on each rank; a group ends its collectives in order
        self.ended = [0] * len(credits)
        #: messages of the leader that each rank has not read yet
        self.unread: list[list[list[int]]] = [[] for _ in credits]
        self.replay = replay

    def issue(self, rank: int, started: Sequence[CommTask]) -> None:
        indices = [task.index for task in started]
        self.issued[rank] += indices
        if rank == 0 and indices and not self.replay:
            for unread in self.unread[1:]:
                unread.append(indices)

    def possible(self, todo: Sequence[Sequence[CommTask]]) -> list[tuple[str, int]]:
        """What may happen next: a task becomes ready, a message is read, a collective ends."""
        everywhere = min(len(issued) for issued in self.issued)
        return (
            [("ready", rank) for rank, tasks in enumerate(todo) if tasks]
            + [("read", rank) for rank, unread in enumerate(self.unread) if unread]
            + [("end", rank) for rank, ended in enumerate(self.ended) if ended < everywhere]
        )

    def iterate(self, chance: random.Random, order: Sequence[int] = ()) -> None:
        """One whole iteration, its events in an order drawn by `chance`."""
        todo = [chance.sample(tasks, len(tasks)) for tasks in self.plans]
        if self.replay:
            for rank, core in enumerate(self.cores):
                self.issue(rank, core.ordered(order))
        while events := self.possible(todo):
            event, rank = chance.choice(events)
            core = self.cores[rank]
            if event == "ready":
                task = todo[rank].pop()
                task.notify_ready()
                self.issue(rank, core.ready(task))
            elif event == "read":
                self.issue(rank, core.ordered(self.unread[rank].pop(0)))
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
def test_followers_issue_what_the_leader_issues_and_all_drain(
    sizes: list[int], credits: list[int], seed: int
) -> None:
    ranks, chance = Ranks(sizes, credits, replay=False), random.Random(seed)
    for iteration in range(1, 4):
        ranks.iterate(chance)
        assert all(core.idle for core in ranks.cores), ranks.cores
        assert len(ranks.issued[0]) == iteration * len(sizes)
        assert all(issued == ranks.issued[0] for issued in ranks.issued)
    assert sorted(ranks.issued[0]) == sorted(list(range(len(sizes))) * 3)


@settings(max_examples=150)
@given(**jobs)
def test_a_replayed_order_needs_no_messages_and_drains(
    sizes: list[int], credits: list[int], seed: int
) -> None:
    ranks, chance = Ranks(sizes, credits, replay=True), random.Random(seed)
    order = chance.sample(range(len(sizes)), len(sizes))
    for _ in range(3):
        ranks.iterate(chance, order)
        assert all(core.idle for core in ranks.cores), ranks.cores
    assert all(issued == order * 3 for issued in ranks.issued)


def test_the_leader_changes_to_replay_between_iterations() -> None:
    ranks, chance = Ranks([5] * 6, [10, 10], replay=False), random.Random(1)
    ranks.iterate(chance)
    learned = list(ranks.issued[0])
    for core in ranks.cores:
        core.use_queue(Following())
    ranks.replay = True
    ranks.iterate(chance, learned)
    assert ranks.issued == [learned * 2] * 2


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


def test_a_leader_is_not_led() -> None:
    with pytest.raises(TypeError, match="leader"):
        Leading(Priority()).extend([0])
