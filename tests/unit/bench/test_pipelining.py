"""Stages of a profile, the order 1F1B, and what a repeated iteration takes with its reductions."""

from __future__ import annotations

import pytest

from bytesched.bench.pipelining import stage_shapes, table
from bytesched.bench.profile import load_profile
from bytesched.bench.steady import arrivals_s, bound_s, reduced_at_end_s
from bytesched.pipeline.order import Order
from bytesched.pipeline.stages import Link, Pipeline, Stage
from bytesched.plugins.pipelines.orders import torch_order

V_WHOLE = "0F0,0F1,3F0,3B0,0B0,3F1,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n"


def _pipeline(ranks: tuple[int, ...], nbytes: int) -> Pipeline:
    stage = Stage(1.0, 1.0, 1.0, 1, 0, nbytes)
    return Pipeline((stage,) * len(ranks), ranks, Link(2.0), 2)


def _one_f_one_b(ranks: int, micro_batches: int) -> Order:
    return torch_order("1F1B", ranks, 1, micro_batches)


def test_every_shape_is_in_one_stage() -> None:
    profile = load_profile("gpt")
    stages = stage_shapes(profile, 4)
    assert all(stages)
    assert [shape for stage in stages for shape in stage] == [
        shape for layer in profile.layers for shape in layer.shapes
    ]


def test_a_pipeline_alone_takes_what_its_row_takes() -> None:
    order = _one_f_one_b(2, 2)
    assert reduced_at_end_s(order, _pipeline((0, 1), 0)) == pytest.approx(9)


def test_a_first_stage_alone_on_its_rank_hides_nothing() -> None:
    order, pipeline = _one_f_one_b(2, 2), _pipeline((0, 1), 3)
    assert reduced_at_end_s(order, pipeline) == pytest.approx(10.5)
    assert bound_s(order, pipeline) == pytest.approx(10.5)


def test_reductions_beside_other_stages_are_hidden() -> None:
    order = Order.parse(V_WHOLE)
    alone_s = bound_s(order, _pipeline((0, 1, 1, 0), 0))
    pipeline = _pipeline((0, 1, 1, 0), 3)
    assert alone_s <= bound_s(order, pipeline) < reduced_at_end_s(order, pipeline)


def test_an_urgent_transfer_interrupts_another() -> None:
    assert arrivals_s([(2, 3), (0, 4)]) == [5, 7]
    assert arrivals_s([(0, 0), (3, 1)]) == [0, 4]


def test_the_table_says_what_is_hidden() -> None:
    arms = {"at the end": [10.0], "bytesched": [8.5]}
    bits = dict.fromkeys(arms, True)
    its = {"end_ms": [10.0], "bound_ms": [8.0], "activations": 4, "iteration_ms": arms}
    lines = table({"schedules": {"zbv": {**its, "same_bits": bits}}})
    assert lines[2].split()[-2:] == ["%", "same"]
    assert "75 %" in lines[2]
    assert "1.062x" in lines[2]


def test_every_round_is_held_against_its_own_link() -> None:
    arms = {"at the end": [10.0, 20.0, 10.0], "bytesched": [8.5, 17.0, 9.0]}
    its = {"end_ms": [10.0, 20.0, 10.0], "bound_ms": [8.0, 16.0, 8.0], "activations": 4}
    bits = dict.fromkeys(arms, True)
    lines = table({"schedules": {"zbv": {**its, "iteration_ms": arms, "same_bits": bits}}})
    assert "1.000x" in lines[1]
    assert "1.062x" in lines[2]
    assert "75 %" in lines[2]


@pytest.mark.parametrize("times", [(9.95, 10.0, 9.0), (10.0, 8.0, 8.0), (10.0, 8.0, 7.5)])
def test_where_nothing_can_be_hidden_the_table_says_so(times: tuple[float, float, float]) -> None:
    """The bound, the prediction for a reduction at the end, and what that took."""
    bound_ms, end_ms, took_ms = times
    arms = {"at the end": [took_ms], "bytesched": [8.5]}
    its = {"end_ms": [end_ms], "bound_ms": [bound_ms], "activations": 4, "iteration_ms": arms}
    lines = table({"schedules": {"zbv": {**its, "same_bits": dict.fromkeys(arms, True)}}})
    assert lines[2].split()[-2:] == ["-", "same"]
