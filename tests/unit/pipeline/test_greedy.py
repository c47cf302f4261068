"""The order that is there before any search: it ends, and within the memory it is no bad one."""

from __future__ import annotations

import pytest
from drawn_orders import plans
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.pipeline.greedy import greedy
from bytesched.pipeline.inputs import placed
from bytesched.pipeline.order import Order
from bytesched.pipeline.replay import replay
from bytesched.pipeline.solver import Budget
from bytesched.pipeline.stages import Link, Pipeline, Stage
from bytesched.pipeline.ticks import Ticks


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
