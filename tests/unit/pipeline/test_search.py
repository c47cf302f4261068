"""The search for an order, judged by replay: what it begins with, its solver, and what it finds."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from drawn_orders import plans
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.errors import ConfigError, PluginError
from bytesched.pipeline.greedy import greedy
from bytesched.pipeline.order import Order
from bytesched.pipeline.replay import replay
from bytesched.pipeline.search import search
from bytesched.pipeline.solver import Budget, cp_model
from bytesched.pipeline.stages import Link, Pipeline, Stage, placed
from bytesched.pipeline.ticks import Ticks
from bytesched.plugins.pipelines.orders import SCHEDULES, torch_order

HELD = 1000


def pipeline(name: str, per_rank: int, latency_s: float = 0.0, replicas: int = 1) -> Pipeline:
    stages = (Stage(1.0, 1.0, 1.0, HELD, 0, 4),) * (4 * per_rank)
    return Pipeline(stages, placed(name, 4, per_rank), Link(4.0, latency_s), replicas)


def test_a_line_of_four_has_no_bubbles_with_the_memory_of_four() -> None:
    found = search(pipeline("interleaved", 1), 8, memory_bytes=4 * HELD, time_limit_s=60)
    assert found.repetend.full
    assert found.repetend.memory_bytes == 4 * HELD
    assert found.repetend.proved
    assert found.timeline.end_s == 33
    assert found.gap == 0


def test_there_and_back_with_halves_holds_four_half_stages() -> None:
    found = search(pipeline("v", 2), 8, split_backward=True, time_limit_s=60)
    assert (found.repetend.full, found.repetend.memory_bytes) == (True, 4 * HELD)
    assert found.repetend.proved


@pytest.mark.parametrize("latency_s", [0.5, 1.0])
@pytest.mark.nightly
def test_without_orders_of_torch_it_is_no_worse_than_their_best_and_repeats_itself(
    latency_s: float,
) -> None:
    its = pipeline("v", 2, latency_s=latency_s)
    orders = [torch_order(n, 4, 2, 8) for n, how in SCHEDULES.items() if how == "v"]
    best = min((replay(order, its) for order in orders), key=lambda each: each.end_s)
    memory_bytes = max(best.peak_bytes)
    # Where only work is counted, a busy machine finds the same.
    found, again = (
        search(
            its,
            8,
            memory_bytes=memory_bytes,
            split_backward=True,
            time_limit_s=5,
            clock=lambda: 0.0,
        )
        for _ in range(2)
    )
    assert found.timeline.end_s <= best.end_s
    assert max(found.timeline.peak_bytes) <= memory_bytes
    assert found.order == again.order
    assert replay(found.order, its) == found.timeline


def test_reductions_count_until_they_end() -> None:
    alone, two = (
        search(pipeline("interleaved", 1, replicas=n), 2, time_limit_s=20) for n in (1, 2)
    )
    assert alone.timeline.end_s < two.timeline.end_s <= alone.timeline.end_s + 1
    assert len(two.timeline.reductions) == 4


def test_too_little_memory_is_told_with_the_least_that_does() -> None:
    with pytest.raises(ConfigError, match=r"1999 bytes of memory .* holds 2000 bytes"):
        search(pipeline("v", 2), 4, memory_bytes=2 * HELD - 1)
    found = search(pipeline("v", 2), 4, memory_bytes=2 * HELD, time_limit_s=2)
    assert max(found.timeline.peak_bytes) == 2 * HELD


class Clock:
    """On which every reading takes a hundredth of a second, and nothing else any time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s


@pytest.mark.parametrize("time_limit_s", [0.1, 0.5, 2.0, 5.0])
@pytest.mark.one_in(3)
def test_no_model_is_built_or_solved_beyond_the_limit(
    time_limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    late: list[str] = []
    cp = cp_model()
    add, solve = cp.CpModel.add, cp.CpSolver.solve

    def added(model: Any, constraint: Any) -> Any:
        if clock.now_s > time_limit_s:
            late.append(f"a constraint at {clock.now_s}")
        return add(model, constraint)

    def solved(solver: Any, model: Any) -> Any:
        until_s = clock.now_s + solver.parameters.max_time_in_seconds
        if until_s > time_limit_s + 1e-9:
            late.append(f"a solution until {until_s}")
        return solve(solver, model)

    monkeypatch.setattr(cp.CpModel, "add", added)
    monkeypatch.setattr(cp.CpSolver, "solve", solved)
    stages = (Stage(1.0, 1.0, 1.0, HELD),) * 32
    its = Pipeline(stages, placed("v", 16, 2), Link(4.0, 0.1))
    found = search(its, 12, memory_bytes=12 * HELD, time_limit_s=time_limit_s, clock=clock)
    assert not late
    assert found.cut_short
    assert found.order.micro_batches == 12


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_orders_are_orders(name: str) -> None:
    per_rank = 1 if SCHEDULES[name] == "single" else 2
    order = torch_order(name, 4, per_rank, 8)
    assert (order.ranks, order.micro_batches) == (4, 8)


def test_what_is_proved_of_rounded_times_is_not_said_of_the_times() -> None:
    times = (39.51, 39.51, 41.51, 38.51, 40.51, 40.45)
    first, second = (
        Stage(forward / 1e3, inputs / 1e3, weights / 1e3, HELD)
        for forward, inputs, weights in (times[:3], times[3:])
    )
    rows = (
        "0F0,0F1,3F0,0F2,3I0,3W0,3F1,3I1,3W1,0B0,3F2,3I2,3W2,0F3,0B1,3F3,3I3,3W3,0B2,0B3",
        "1F0,2F0,1F1,2F1,1F2,2F2,2I0,2W0,1I0,1W0,2I1,2W1,1I1,1W1,2I2,1F3,2F3,2W2,1I2,1W2,2I3,1I3,"
        "2W3,1W3",
    )
    its = Pipeline((first, first, second, second), (0, 1, 1, 0), Link(1e9))
    other = replay(Order.parse("\n".join(rows)), its)
    found = search(its, 4, split_backward=True, time_limit_s=60)
    assert not found.ticks.exact
    assert found.bound_s <= other.end_s


@settings(max_examples=50)
@given(plans(), st.booleans(), st.integers(1, 6), st.integers(0, 9))
def test_every_memory_that_is_enough_for_one_micro_batch_is_enough(
    plan: tuple[Order, Pipeline], split: bool, micro_batches: int, more: int
) -> None:
    _, pipeline = plan
    memory = pipeline.least_memory_bytes() + more
    ticks = Ticks.of(pipeline, split)
    # To be an order, it has to have every action, and ranks must not wait for each other.
    order = Order(greedy(ticks, micro_batches, memory, Budget(1, lambda: 0.0)))
    assert order.micro_batches == micro_batches
    assert max(replay(order, pipeline).peak_bytes) <= memory


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "memory", "split", "most"),
    [
        # Of the bound, which one micro-batch at a time exceeds fifteen times, and six times.
        (16, 60, None, False, 1.2),
        (16, 60, None, True, 1.1),
        (8, 16, 10, False, 1.5),
        (8, 16, 10, True, 1.2),
    ],
)
def test_it_is_near_the_bound(
    ranks: int, micro_batches: int, memory: int | None, split: bool, most: float
) -> None:
    stages = (Stage(0.1, 0.1, 0.1, 1),) * (2 * ranks)
    pipeline = Pipeline(stages, placed("v", ranks, 2), Link(1e9, 0.005))
    ticks = Ticks.of(pipeline, split)
    limit = memory or 2 * micro_batches
    order = Order(greedy(ticks, micro_batches, limit, Budget(1, lambda: 0.0)))
    bound_s = ticks.least(micro_batches, limit) * ticks.tick_s
    assert replay(order, pipeline).end_s <= most * bound_s


def test_a_missing_solver_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PluginError, match=r"pip install 'bytesched\[pipeline\]'"):
        search(Pipeline((Stage(1, 1, 1),) * 2, (0, 1)), 2)
