"""Measured rounds, plans made from them, and ranks that adopt them together."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_wire import FakeWire
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.observe import Observer, Observers
from bytesched.plugins.planned import clocks, planning
from bytesched.plugins.planned.buckets import Chunk
from bytesched.plugins.planned.clocks import HostClock
from bytesched.plugins.planned.planning import (
    PLANNED_AGAIN_IN,
    PLANNED_IN,
    Planning,
    Stage,
    first_gates,
)

MS = 1_000_000


#: stands still until it is told
CLOCK = SimpleNamespace(now_ns=0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (planning, clocks):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: CLOCK.now_ns)


class Rank:
    """One rank's part; the last chunk is needed first."""

    def __init__(
        self,
        ranks: list[FakeWire],
        sizes: Sequence[int],
        policy: str = "priority",
        observers: Sequence[Observer] = (),
        *,
        sees_ends: bool = True,
    ) -> None:
        self.wire = FakeWire(ranks=ranks)
        self.wire.sees_ends = sees_ends
        bucket: Any = SimpleNamespace()
        self.bucket = bucket
        self.new_parameters()
        bucket.chunks = self.chunks = [
            Chunk(bucket, index, torch.zeros(size), None, f"p{index}")
            for index, size in enumerate(sizes)
        ]
        self.planning = Planning(
            self.wire,
            Observers(observers),
            policy=policy,
            credit_bytes=0,
            gate_of=lambda chunk: len(sizes) - chunk.index,
            clock=HostClock(),
        )

    def new_parameters(self) -> None:
        """The bucket is one of a parameter that was in none before."""
        self.bucket.members = [SimpleNamespace(parameter=object())]

    def round(self, ready_ms: Sequence[int], took_ms: int = 0) -> None:
        """Chunks become ready at these times, and are issued as the plan has them.

        Args:
            took_ms: how long the link takes for each, one after the other; 0: sums do not end.
        """
        plan, began_ns, ready = self.planning, CLOCK.now_ns, set[int]()
        plan.round_begins()
        coming = sorted(range(len(self.chunks)), key=lambda index: (ready_ms[index], index))
        left = list(plan.order or coming)
        free_ns = began_ns
        self.ends: list[tuple[int, Chunk]] = []
        for index in coming:
            self.pass_to(began_ns + ready_ms[index] * MS)
            ready.add(index)
            plan.ready([self.chunks[index]])
            while left and left[0] in ready:
                chunk = self.chunks[left.pop(0)]
                chunk.work = self.wire.start(chunk.sent)
                plan.issued(chunk, is_last=not left)
                if took_ms:
                    free_ns = max(free_ns, CLOCK.now_ns) + took_ms * MS
                    self.ends.append((free_ns, chunk))
        plan.round_ends([self.bucket])

    def pass_to(self, at_ns: int) -> None:
        """Time passes; sums end by then."""
        while self.ends and self.ends[0][0] <= at_ns:
            CLOCK.now_ns, chunk = self.ends.pop(0)
            chunk.work.finish()
            self.planning.waited(chunk)
        CLOCK.now_ns = max(CLOCK.now_ns, at_ns)


class Job:
    """Ranks that go through the same rounds."""

    def __init__(
        self, *sizes: Sequence[int], policies: Sequence[str] = (), sees_ends: bool = True
    ) -> None:
        wires: list[FakeWire] = []
        policies = policies or ["priority"] * len(sizes)
        self.ranks = [
            Rank(wires, *one, sees_ends=sees_ends) for one in zip(sizes, policies, strict=True)
        ]

    def round(
        self,
        ready_ms: Sequence[Sequence[int]] | None = None,
        ends: Sequence[int] = (),
        unended: Sequence[int] = (),
        took_ms: int = 1,
    ) -> None:
        """One round of all ranks, which are as far as the last one when it ends.

        Args:
            ready_ms: when chunks become ready, for each rank.
            ends: the order in which sums end, after the last bucket; as they are sent if empty.
            unended: ranks that learn of no end before they tell the others.
        """
        began_ns = last_ns = CLOCK.now_ns
        for number, rank in enumerate(self.ranks):
            CLOCK.now_ns = began_ns
            chosen = ready_ms[number] if ready_ms else range(len(rank.chunks))
            is_late = bool(ends) or number in unended
            rank.round(chosen, 0 if is_late else took_ms)
            for index in ends if number not in unended else ():
                CLOCK.now_ns += took_ms * MS
                rank.chunks[index].work.finish()
            rank.pass_to(CLOCK.now_ns + 100 * MS)
            last_ns = max(last_ns, CLOCK.now_ns)
        CLOCK.now_ns = last_ns
        for rank in self.ranks:
            rank.planning.landed()

    def rounds(self, count: int, **options: Any) -> None:
        for _ in range(count):
            self.round(**options)

    @property
    def orders(self) -> list[Any]:
        return [rank.planning.order for rank in self.ranks]

    @property
    def stages(self) -> list[Stage]:
        return [rank.planning.stage for rank in self.ranks]


def test_a_plan_takes_four_rounds() -> None:
    job = Job([10, 20, 30], [10, 20, 30])
    stages = [Stage.ALIKE, Stage.MEASURED, Stage.PLANNED, Stage.ALIKE]
    for stage in stages:
        assert job.orders == [None, None]
        job.round()
        assert job.stages == [stage] * 2
    first, second = job.orders
    assert first == second
    assert sorted(first) == [0, 1, 2]
    assert "chunks are sent as planned" in repr(job.ranks[0].planning)


def test_where_ends_are_not_seen_a_plan_takes_waits_and_a_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job([10, 20, 30], [10, 20, 30], sees_ends=False)
    wait = FakeWire.wait

    def slow(wire: FakeWire, work: Any, task: str) -> None:
        CLOCK.now_ns += MS
        wait(wire, work, task)

    monkeypatch.setattr(FakeWire, "wait", slow)
    for _ in range(PLANNED_IN):
        assert job.orders == [None, None]
        job.round()
    assert sorted(job.orders[0]) == [0, 1, 2]
    assert job.orders[0] == job.orders[1]
    for rank in job.ranks:
        assert rank.planning.seconds_per_byte > 0.0
        assert rank.planning.busy_ns == 3 * MS
        assert len(rank.wire.started) > 3 * PLANNED_IN


def test_what_is_needed_first_goes_first_among_what_is_ready() -> None:
    """Two are under way at once; what counts is when a chunk is ready on the last rank."""
    job = Job([10] * 4, [10] * 4)
    job.rounds(PLANNED_IN, ready_ms=[[0, 1, 2, 3], [0, 5, 5, 5]], took_ms=20)
    assert job.orders == [[0, 3, 2, 1]] * 2


@settings(max_examples=40)
@given(st.data(), st.integers(2, 4), st.integers(1, 6), st.integers(0, 12))
def test_all_ranks_have_the_same_plan_in_the_same_round(
    data: st.DataObject, size: int, chunks: int, more: int
) -> None:
    job = Job(*[[8 * (index + 1) for index in range(chunks)]] * size)
    times = st.lists(st.integers(0, 9), min_size=chunks, max_size=chunks)
    for number in range(1, PLANNED_IN + more + 1):
        job.round(
            data.draw(st.lists(times, min_size=size, max_size=size)),
            data.draw(st.permutations(range(chunks))),
            data.draw(st.sets(st.integers(0, size - 1)).map(sorted)) if number > 4 else (),
            data.draw(st.integers(1, 5)),
        )
        assert len({str(order) for order in job.orders}) == 1
        assert len(set(job.stages)) == 1
        assert len({len(rank.wire.told) for rank in job.ranks}) == 1
        if number >= PLANNED_IN and job.orders[0] is not None:
            assert sorted(job.orders[0]) == list(range(chunks))


def test_a_rank_that_has_not_seen_all_ends_has_no_plan_made() -> None:
    """It tells nothing rather than half of it, and the others go on as it does."""
    job = Job([10, 20], [10, 20])
    job.round()
    job.round(unended=[1])
    job.round()
    assert job.stages == [Stage.ALIKE] * 2
    assert job.orders == [None, None]
    job.rounds(6)
    assert job.orders[0] is not None


@pytest.mark.parametrize(
    ("sizes", "policies"),
    [
        (([10, 20], [10, 30]), ()),
        (([10, 20], [10, 10, 10]), ()),
        (([10, 20], [10, 20]), ("priority", "lifo")),
        (([10, 20], [10, 20]), ("fifo", "fifo")),
    ],
    ids=["other sizes", "other chunks", "another policy", "fifo"],
)
def test_nobody_plans_where_it_cannot_be_or_is_not_asked_for(
    sizes: Any, policies: Sequence[str]
) -> None:
    job = Job(*sizes, policies=policies)
    job.rounds(8)
    assert job.stages == [Stage.DIFFERENT] * 2
    assert job.orders == [None, None]
    # Two numbers were compared, once.
    assert [[len(told) for told in rank.wire.told] for rank in job.ranks] == [[2], [2]]


def test_plans_that_differ_are_not_followed() -> None:
    job = Job([10, 20], [10, 20])
    job.rounds(PLANNED_IN - 1)
    job.ranks[1].planning._planned.reverse()
    job.round()
    assert job.stages == [Stage.ALIKE] * 2
    assert job.orders == [None, None]


@pytest.mark.parametrize("slower", [(), (0,), (1,), (0, 1)])
def test_a_plan_that_is_slower_is_given_up(slower: tuple[int, ...]) -> None:
    """If iterations were at two measured rounds; those of the slowest rank count."""
    job, measured, orders = Job([10] * 3, [10] * 3), 0, list[Any]()
    for _ in range(25):
        is_measured = job.stages[0] is Stage.MEASURED and job.orders[0] is not None
        if job.orders[0] is not None:
            CLOCK.now_ns += (50 if measured in slower else -1) * MS
        measured += is_measured
        job.round([[0, 0, 0]] * 2)
        orders.append(job.orders[0])
    assert measured == 2
    assert [2, 1, 0] in orders
    assert job.orders == [None if slower == (0, 1) else [2, 1, 0]] * 2


@pytest.mark.parametrize(
    ("renewed", "rounds"),
    [((), PLANNED_AGAIN_IN), ((0, 1), PLANNED_IN), ((1,), None)],
    ids=["known parameters", "others", "others on one rank"],
)
def test_other_buckets_begin_again(renewed: Sequence[int], rounds: int | None) -> None:
    """Parameters that were in no bucket are measured first; where one knows less, none plans."""
    job = Job([10, 20], [10, 20])
    job.rounds(PLANNED_IN)
    assert None not in job.orders
    for number in renewed:
        job.ranks[number].new_parameters()
    for rank in job.ranks:
        rank.planning.forget()
    assert job.stages == [Stage.NEW] * 2
    for _ in range(rounds or 2 * PLANNED_IN):
        assert job.orders == [None, None]
        job.round()
    if rounds is None:
        assert job.stages == [Stage.DIFFERENT] * 2
        assert [rank.planning._times for rank in job.ranks] == [[], []]
    else:
        assert None not in job.orders


def test_how_long_the_link_is_busy_is_known_from_the_first_round() -> None:
    job = Job([10, 10])
    [rank] = job.ranks
    job.round([[0, 5]], took_ms=3)
    # It has nothing to do from 3 to 5.
    assert rank.planning.busy_ns == 6 * MS


def test_observers_are_told_of_every_chunk() -> None:
    observer, seen = Observer(), list[Any]()
    vars(observer)["on_span"] = lambda track, name, began_ns, ended_ns, args: seen.append(
        (track, name, ended_ns - began_ns, args)
    )
    rank = Rank([], [10, 20], observers=[observer])
    for _ in range(2):
        rank.round([0, 0], took_ms=5)
        rank.pass_to(CLOCK.now_ns + 100 * MS)
        rank.planning.landed()
    sent = [
        ("send", f"p{i}", (i + 1) * 5 * MS, {"bytes": 40 * (i + 1), "chunk": i}) for i in (0, 1)
    ]
    assert seen == sent * 2


def test_the_first_gate_is_that_of_the_member_that_is_used_first() -> None:
    one, two, other = object(), object(), object()
    chunk: Any = SimpleNamespace()
    inside = [chunk]
    members = [
        SimpleNamespace(parameter=one, chunks=[]),
        SimpleNamespace(parameter=two, chunks=inside),
        SimpleNamespace(parameter=other, chunks=inside),
    ]
    chunk.bucket = SimpleNamespace(members=members)
    gate_of = first_gates({id(one): 0, id(two): 5, id(other): 3})
    assert gate_of(chunk) == 3
    # Those that no forward pass has used come last.
    assert first_gates({id(one): 0})(chunk) == 1
