"""Ranks of mixture of experts that differ: all of them are told, or it is allowed."""

from __future__ import annotations

import pytest
from moe_differing import (
    a_router_in_32_bits,
    another_dtype_of_one_rank,
    experts_that_fail,
    frozen_on_one_rank,
    infers,
    layers_in_another_order,
)
from ranks import Ranks

pytestmark = pytest.mark.procs


def test_an_expert_that_fails_is_told_on_all_ranks_which_go_on(three_ranks: Ranks) -> None:
    first, second, last = three_ranks.run(experts_that_fail)
    assert first == second
    for found in first[:2]:
        assert found.startswith("MismatchError: experts of rank 2 of the group did not compute")
    assert last[0].startswith("MismatchError: an expert made")
    assert last[1] == "ValueError: not today"
    assert first[2] == last[2] == "no error"


def test_results_have_the_dtype_of_tokens_whatever_one_rank_makes(two_ranks: Ranks) -> None:
    assert two_ranks.run(another_dtype_of_one_rank) == [True, True]


def test_ranks_in_different_layers_are_told_which(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(layers_in_another_order)
    assert first == second
    for found in first[:2]:
        assert found.startswith("MismatchError: the ranks disagree about what comes next")
    assert "rank 1 is in MoE layer A" in first[0]
    assert "rank 0 of the group is in MoE layer A, rank 1 is in moe.exchange()" in first[2]
    assert "rank 0 has 8, rank 1 has 16" in first[3]
    assert first[4] == "no error"


def test_rows_arrive_in_inference_mode(two_ranks: Ranks) -> None:
    assert two_ranks.run(infers) == [True, True]


def test_experts_are_trained_beside_frozen_ones_of_another_rank(two_ranks: Ranks) -> None:
    for equal, found in two_ranks.run(frozen_on_one_rank):
        assert equal
        assert "rank 1 computes without gradients" in found


def test_a_router_may_be_wider_than_tokens(two_ranks: Ranks) -> None:
    assert two_ranks.run(a_router_in_32_bits) == [True, True]
