"""Ranks of mixture of experts that differ: all of them are told, or it is allowed."""

from __future__ import annotations

import pytest
from moe_differing import (
    a_router_in_32_bits,
    another_dtype_of_one_rank,
    bad_arguments,
    copied_and_compiled,
    experts_of_another_width,
    frozen_on_one_rank,
    infers,
    layers_in_another_order,
)
from ranks import Ranks

pytestmark = pytest.mark.procs


def test_an_expert_of_another_width_is_an_error_on_all_ranks_which_go_on(
    three_ranks: Ranks,
) -> None:
    first, second, last = three_ranks.run(experts_of_another_width)
    assert last[0].startswith("PluginError: experts of layer")
    for found in (first, second):
        # The other rank that is told closes its connections too: whichever end is seen first.
        assert found[0].startswith("PeerLost: "), found
        assert "rank 2" in found[0].partition(" is gone")[0], found
        assert "rank 2 said: experts of layer" in found[0], found
    assert [found[1] for found in (first, second, last)] == ["no error"] * 3


def test_results_have_the_dtype_of_tokens_whatever_one_rank_makes(two_ranks: Ranks) -> None:
    assert two_ranks.run(another_dtype_of_one_rank) == [True, True]


def test_ranks_in_different_layers_are_told_which(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(layers_in_another_order)
    assert first == second
    for found in first[:3]:
        assert found.startswith("MismatchError: the ranks of the exchange disagree: rank 0 has")
        assert found.endswith("nothing was sent")
    assert "in many, rank 1 has" in first[0]
    assert "in few, and 4 counts in place of 16" in first[0]
    assert "in same" in first[1]
    assert "in few, rank 1 has" in first[2]
    assert first[3] == (
        "MismatchError: the ranks disagree about the gate's experts: rank 0 of the layer has 4, "
        "rank 1 has 8"
    )
    assert first[4] == "no error"


def test_rows_arrive_in_inference_mode(two_ranks: Ranks) -> None:
    assert two_ranks.run(infers) == [True, True]


def test_experts_are_trained_beside_frozen_ones_of_another_rank(two_ranks: Ranks) -> None:
    for equal, found in two_ranks.run(frozen_on_one_rank):
        assert equal
        assert "rank 1 of the exchange computes without gradients" in found


def test_a_router_may_be_wider_than_tokens(two_ranks: Ranks) -> None:
    assert two_ranks.run(a_router_in_32_bits) == [True, True]


def test_layers_can_be_copied_and_compiled(two_ranks: Ranks) -> None:
    assert two_ranks.run(copied_and_compiled) == [(True, True)] * 2


def test_pieces_are_at_least_one(two_ranks: Ranks) -> None:
    for found in two_ranks.run(bad_arguments):
        assert all(line.startswith("ConfigError: most_pieces = ") for line in found)
