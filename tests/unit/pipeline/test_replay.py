"""What any order takes, by properties that do not depend on how replay works."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from drawn_orders import plans
from hypothesis import given

from bytesched.errors import ConfigError
from bytesched.pipeline.order import Action, Kind, Order, in_turn, needs
from bytesched.pipeline.replay import replay
from bytesched.pipeline.stages import FREE, Pipeline, Stage


@given(plans())
def test_nothing_starts_before_what_it_needs_and_a_rank_does_one_thing_at_a_time(
    plan: tuple[Order, Pipeline],
) -> None:
    order, pipeline = plan
    timeline = replay(order, pipeline)
    spans = {span.action: span for span in timeline.spans}
    assert set(spans) == set(order.actions())
    for action, span in spans.items():
        for need in needs(action, order.stages, spans):
            crossing_s = pipeline.crossing_s(need.stage, action.stage)
            assert span.start_s >= spans[need].end_s + crossing_s
    for row in order.rows:
        end_s = 0.0
        for action in filter(None, row):
            assert spans[action].start_s >= end_s
            end_s = spans[action].end_s


@given(plans())
def test_nothing_waits_without_a_reason(plan: tuple[Order, Pipeline]) -> None:
    order, pipeline = plan
    spans = {span.action: span for span in replay(order, pipeline).spans}
    for row in order.rows:
        free_s = 0.0
        for action in filter(None, row):
            ready_s = [
                spans[need].end_s + pipeline.crossing_s(need.stage, action.stage)
                for need in needs(action, order.stages, spans)
            ]
            assert spans[action].start_s == max([free_s, *ready_s])
            free_s = spans[action].end_s


@given(plans())
def test_a_faster_link_and_one_copy_are_no_slower(plan: tuple[Order, Pipeline]) -> None:
    order, pipeline = plan
    end_s = replay(order, pipeline).end_s
    assert replay(order, replace(pipeline, link=FREE)).end_s <= end_s
    assert replay(order, replace(pipeline, replicas=1)).end_s <= end_s


@given(plans())
def test_everything_that_is_held_is_freed(plan: tuple[Order, Pipeline]) -> None:
    order, pipeline = plan
    peaks = replay(order, pipeline).peak_bytes
    for row, peak in zip(order.rows, peaks, strict=True):
        changes = [pipeline.held_bytes(action) for action in row if action is not None]
        assert sum(changes) == 0
        assert peak == max(sum(changes[:n]) for n in range(len(changes) + 1))


@given(plans())
def test_reductions_come_after_the_last_gradient_and_one_by_one(
    plan: tuple[Order, Pipeline],
) -> None:
    order, pipeline = plan
    timeline = replay(order, pipeline)
    for rank in range(order.ranks):
        own = [each for each in timeline.reductions if each.rank == rank]
        for before, after in pairwise(own):
            assert after.start_s >= before.end_s
        for each in own:
            gradients = (
                span.end_s
                for span in timeline.spans
                if span.action.stage == each.stage
                and span.action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
            )
            assert each.start_s >= max(gradients)


def test_rows_that_wait_for_each_other_are_followed_as_far_as_they_go() -> None:
    forward = [Action(0, Kind.FORWARD, n) for n in range(2)]
    later = [Action(1, Kind.FORWARD, n) for n in range(2)]
    backward = Action(1, Kind.BACKWARD, 1)
    rows = [[forward[0], Action(0, Kind.BACKWARD, 0), forward[1]], [later[1], backward, later[0]]]
    assert [action for action, _ in in_turn(rows, 2)] == [forward[0]]


def test_an_order_for_other_ranks() -> None:
    order = Order.parse("0F0,0B0\n1F0,1B0\n", "order a.csv")
    with pytest.raises(ConfigError, match=r"a\.csv has its stages on ranks \[0, 1\]"):
        replay(order, Pipeline((Stage(1, 1, 1),) * 2, (0, 0)))
