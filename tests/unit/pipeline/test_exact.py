"""The search beside every order that there is, for pipelines small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest

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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("split", [False, True])
def test_no_order_ends_before_the_bound(case: str, split: bool) -> None:
    stages, link = CASES[case]
    pipeline = Pipeline(stages, (0, 1), link, 2)
    ticks = Ticks.of(pipeline, split)
    assert (
        min(each.end_s for each in _all(pipeline, split)) >= ticks.least(2, 4) * ticks.tick_s - 1e-9
    )


@pytest.mark.parametrize("memory", [2, 3, 4])
@pytest.mark.parametrize("split", [False, True])
def test_a_repetend_repeats(split: bool, memory: int) -> None:
    pipeline = Pipeline((Stage(2, 1, 1, 1, 2, 0),) * 4, (0, 1, 1, 0), Link(4.0), 1)
    ticks = Ticks.of(pipeline, split)
    patterns = repetend(ticks, memory, Budget(60), 1.0)
    assert patterns
    for found in patterns:
        assert found.memory_bytes <= memory
        for rank in range(ticks.ranks):
            busy = [
                (found.starts[n] + tick) % found.period
                for n in ticks.on(rank)
                for tick in range(ticks.blocks[n].duration)
            ]
            assert len(busy) == len(set(busy))
            assert _held(ticks, rank, found.starts, found.period) <= found.memory_bytes
        for n, block in enumerate(ticks.blocks):
            for needed, gap in block.needs:
                over = found.starts[needed] + ticks.blocks[needed].duration
                assert found.starts[n] >= over + gap


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
