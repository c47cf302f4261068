"""Orders of a pipeline: their file, what is no order, and what any order takes, by properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from drawn_orders import orders, plans
from hypothesis import given

from bytesched.errors import ConfigError
from bytesched.pipeline.order import Action, Kind, Order, in_turn, needs
from bytesched.pipeline.replay import replay
from bytesched.pipeline.stages import FREE, Pipeline, Stage

V = "0F0,0F1,3F0,3B0,0B0,3F1,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n"


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text(V)
    order = Order.read(tmp_path / "order.csv")
    assert order.stage_ranks == (0, 1, 1, 0)
    assert (order.ranks, order.stages, order.micro_batches) == (2, 4, 2)
    assert order.rows[1][1] == Action(2, Kind.FORWARD, 0)
    assert not order.splits_backward
    order.write(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == V
    assert Order.read(tmp_path / "again.csv") == order


@pytest.mark.parametrize("text", [f"\ufeff{V}", f"{V}\n", f"{V}\r\n\r\n"])
def test_what_editors_leave_behind(text: str, tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text(text)
    assert Order.read(tmp_path / "order.csv") == Order.parse(V)


def test_idle_cells_and_halves_of_a_backward() -> None:
    order = Order.parse("0F0,,2F0,2I0,2W0,0I0,0W0\n1F0,1B0\n")
    assert order.rows[0][1] is None
    assert order.splits_backward
    assert order.stage_ranks == (0, 1, 0)


@given(orders())
def test_what_is_written_is_read(order: Order) -> None:
    assert Order.parse(order.to_csv()) == order


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "order.csv is empty"),
        ("0F0,0B0\n,\n", "row 2: rank 1 has nothing to do"),
        ("0F0,0B0\n\n1F0,1B0\n", "row 2: rank 1 has nothing to do"),
        ("0F0,0X0\n", "row 1, cell 2: '0X0' is no action"),
        ("0F0,0SEND_F0\n", "cell 2: '0SEND_F0' is not computed, but of torch's format compute_co"),
        ("0UNSHARD,0F0,0B0\n", "cell 1: '0UNSHARD' is not computed, but"),
        ("0F0,0B0,0REDUCE_GRAD\n", "schedule._dump_csv(path, format='compute_only'), or leave"),
        (
            "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n",
            "cell 2: '(0F1;0B0)OVERLAP_F_B' is two actions that torch overlaps: write them as "
            "cells of their own, one after the other: 0F1,0B0",
        ),
        ("0F0,0B0\n1F0,1B0,0F1\n", "row 2, cell 3: 0F1 puts stage 0 on rank 1"),
        ("0F0,0B0\n2F0,2B0\n", "there is a stage 2, but no stage 1"),
        ("0F0,0F0,0B0\n", "row 1, cell 2: 0F0 is there again, after row 1, cell 1"),
        ("0F0,0B0,0F1\n", "stage 0 has F of micro-batch 1"),
        ("0F1,0B1\n", "stage 0 has nothing of micro-batch 0"),
        ("0F0,0I0,0B0\n", "stage 0 has F and B and I of micro-batch 0"),
        ("0F0,0W0,0I0\n", "row 1, cell 2: 0W0 waits for 0I0, which never comes: 0I0 stands behind"),
        ("0B0,0F0\n", "row 1, cell 1: 0B0 waits for 0F0"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "ranks wait for each other in a circle"),
        ('"0F0,0B0\n', "is not valid CSV"),
    ],
)
def test_what_is_no_order(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        Order.read(path)
    assert told in str(raised.value)
    assert str(raised.value).startswith(f"order {path}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Order.read(tmp_path / "none.csv")


@given(plans())
def test_each_action_starts_when_its_rank_is_free_and_all_that_it_needs_is_there(
    plan: tuple[Order, Pipeline],
) -> None:
    order, pipeline = plan
    spans = {span.action: span for span in replay(order, pipeline).spans}
    assert set(spans) == set(order.actions())
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
