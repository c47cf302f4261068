"""The search beside every order that there is, for pipelines small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, count, product

import pytest
from drawn_orders import plans
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.errors import ConfigError
from bytesched.pipeline.order import Action, Order
from bytesched.pipeline.repetend import repetend
from bytesched.pipeline.replay import Timeline, replay
from bytesched.pipeline.search import search
from bytesched.pipeline.solver import Budget
from bytesched.pipeline.stages import Link, Pipeline, Stage
from bytesched.pipeline.ticks import Ticks

CASES = {
    "alike": ((Stage(1, 1, 1, 1, 0, 0),) * 2, Link(1.0)),
    "a slow second stage, dear crossings": (
        (Stage(1, 1, 0.5, 1, 2, 0), Stage(2, 2, 1.5, 1, 0, 0)),
        Link(2.0, 0.5),
    ),
    "reductions": ((Stage(1, 2, 1, 1, 1, 9), Stage(1, 1, 2, 1, 1, 3)), Link(2.0)),
}


def _merged(first: tuple[Action, ...], second: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
    size = len(first) + len(second)
    for places in combinations(range(size), len(first)):
        left, right = iter(first), iter(second)
        yield tuple(next(left) if n in places else next(right) for n in range(size))


def _all(pipeline: Pipeline, split: bool) -> Iterator[Timeline]:
    """Of two micro-batches on two ranks with a stage each."""
    rows = [
        _merged(*(tuple(Action(stage, kind, n) for kind in kinds) for n in range(2)))
        for stage in range(2)
        for kinds in [pipeline.kinds(stage, split)]
    ]
    for each in product(*map(list, rows)):
        try:
            order = Order(each)
        except ConfigError:
            continue
        yield replay(order, pipeline)


@pytest.mark.parametrize("memory", [1, 2])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(2)
def test_no_order_is_better(case: str, split: bool, memory: int) -> None:
    stages, link = CASES[case]
    pipeline = Pipeline(stages, (0, 1), link, 2)
    found = search(pipeline, 2, memory_bytes=memory, split_backward=split, time_limit_s=60)
    within = [each for each in _all(pipeline, split) if max(each.peak_bytes) <= memory]
    assert max(found.timeline.peak_bytes) <= memory
    assert found.timeline.end_s == pytest.approx(min(each.end_s for each in within))
    assert found.gap == 0
    assert found.ticks.exact
    assert found.bound_s == pytest.approx(found.timeline.end_s)


@settings(max_examples=10)
@given(plans())
def test_no_drawn_order_ends_before_what_a_search_proves(plan: tuple[Order, Pipeline]) -> None:
    order, pipeline = plan
    timeline = replay(order, pipeline)
    memory = max(timeline.peak_bytes)
    found = search(
        pipeline,
        order.micro_batches,
        memory_bytes=memory,
        split_backward=True,
        time_limit_s=0.5,
        clock=lambda: 0.0,
    )
    assert max(found.timeline.peak_bytes) <= memory
    assert found.bound_s <= min(timeline.end_s, found.timeline.end_s) + 1e-6
    assert found.gap > 0 or found.timeline.end_s <= timeline.end_s + 1e-6


@settings(max_examples=15)
@given(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 2), st.integers(1, 2))
def test_no_repetend_has_a_shorter_period(times: list[int], gap: int, memory: int) -> None:
    stages = tuple(Stage(1 + times[n], times[n + 1], 0, 1) for n in (0, 2))
    ticks = Ticks.of(Pipeline(stages, (0, 1), Link(1e9, gap)), False)
    found = repetend(ticks, memory, Budget(30, lambda: 0.0), 1.0)[0]
    shortest = next(period for period in count(1) if _repeats(ticks, period, memory))
    assert (found.period, found.shortest) == (shortest, True)


def _repeats(ticks: Ticks, period: int, memory: int) -> bool:
    """Whether there is any pattern of that period, by trying all: none waits longer than that."""
    for waits in product(range(period), repeat=len(ticks.blocks)):
        starts: list[int] = []
        for wait, block in zip(waits, ticks.blocks, strict=True):
            ready = [starts[n] + ticks.blocks[n].duration + gap for n, gap in block.needs]
            starts.append(max(ready, default=0) + wait)
        if waits[0] == 0 and all(
            len(busy) == len(set(busy)) and _held(ticks, rank, tuple(starts), period) <= memory
            for rank in range(ticks.ranks)
            for busy in [_busy(ticks, rank, starts, period)]
        ):
            return True
    return False


def _busy(ticks: Ticks, rank: int, starts: Sequence[int], period: int) -> list[int]:
    return [
        (starts[n] + tick) % period
        for n in ticks.on(rank)
        for tick in range(ticks.blocks[n].duration)
    ]


def test_a_period_that_was_not_refuted_is_not_called_the_shortest() -> None:
    ticks = Ticks.of(
        Pipeline((Stage(0.1, 0.1, 0.1, 1),) * 4, (0, 1, 1, 0), Link(1e9, 0.0137)), True
    )
    (found,) = repetend(ticks, 2, Budget(0.0), 1.0)
    assert found.period > 330
    assert not found.shortest


def _held(ticks: Ticks, rank: int, starts: tuple[int, ...], period: int) -> int:
    """The most that a rank holds once micro-batches keep coming, moment by moment."""
    turns = max(starts) // period + 3
    changes: dict[int, int] = {}
    for turn in range(2 * turns):
        for n in ticks.on(rank):
            block = ticks.blocks[n]
            moment = starts[n] + turn * period + (block.duration if block.held < 0 else 0)
            changes[moment] = changes.get(moment, 0) + block.held
    held = most = 0
    for moment in sorted(changes):
        held += changes[moment]
        most = max(most, held)
    return most
