"""Mixture of experts on several ranks: bits of torch's exchange, results of one process."""

from __future__ import annotations

import pytest
import torch
from all_to_all_cases import by_all_to_all
from moe_cases import (
    bits_by_pieces,
    checkpoints,
    dies_in_a_dispatch,
    disagreements,
    exchange_equals_torch,
    grid_equals_alone,
    layer_equals_alone,
    plain_data_parallel,
    used_in_many_ways,
    volume_falls,
)
from ranks import Ranks, address_of, run_fresh

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "pattern", ["uneven", "some empty", "one rank has none", "to one alone", "none"]
)
def test_the_exchange_has_the_bits_of_torch(
    pattern: str, dtype: torch.dtype, three_ranks: Ranks
) -> None:
    assert three_ranks.run(exchange_equals_torch, pattern, dtype) == [(True, True)] * 3


def test_ranks_that_disagree_are_told_on_all_of_them_and_go_on(three_ranks: Ranks) -> None:
    first, *others = three_ranks.run(disagreements)
    assert others == [first, first]
    sizes, dtype, width, rows, counts, gradient, after = first
    assert sizes == (
        "the ranks disagree about sizes: rank 0 of the exchange sends 1 rows to rank 2, which "
        "awaits 0: nothing was sent"
    )
    assert "rank 0 has torch.float32 of width 6 " in dtype
    assert "rank 2 has torch.float64 of width 6 " in dtype
    assert "rank 2 has torch.float32 of width 5 " in width
    for wrong in (rows, counts):
        assert wrong.startswith("rank 2 of the exchange has rows and counts that do not fit")
    assert "width 6 with gradient" in gradient
    assert after == "True"


def test_a_rank_that_dies_in_a_dispatch_is_a_named_error_on_all_others() -> None:
    *survivors, dead = run_fresh(dies_in_a_dispatch, world_size=4, timeout_s=50)
    assert dead.code == -9
    for survivor in survivors:
        assert survivor.code == 0, survivor.stderr
        assert survivor.stdout.startswith("PeerLost: "), survivor.stdout
        assert "task moe dispatch" in survivor.stdout


@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["top1", "top2", "dts"])
def test_the_layer_equals_one_process(kind: str, pieces: int, two_ranks: Ranks) -> None:
    assert two_ranks.run(layer_equals_alone, kind, pieces) == [[], []]


@pytest.mark.parametrize("kind", ["top2", "dts"])
def test_the_layer_equals_one_process_on_four_ranks(kind: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(layer_equals_alone, kind, 2) == [[]] * 4


def test_a_rank_may_have_no_tokens(two_ranks: Ranks) -> None:
    assert two_ranks.run(layer_equals_alone, "top1", 2, 1) == [[], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pieces_of_whole_experts_have_the_bits_of_one(dtype: torch.dtype, two_ranks: Ranks) -> None:
    assert two_ranks.run(bits_by_pieces, dtype) == [[True] * 3] * 2


def test_a_layer_is_used_twice_checkpointed_accumulated_and_evaluated(two_ranks: Ranks) -> None:
    for found in two_ranks.run(used_in_many_ways):
        assert len(found) == 4
        assert all(found.values()), found


def test_volume_and_pieces_fall_with_the_temperature(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(volume_falls)
    assert [pieces for _, pieces in first] == [pieces for _, pieces in second]
    for found in (first, second):
        kept, pieces = zip(*found, strict=True)
        assert kept[0] > kept[1] > kept[2] > kept[3] == 1.0
        assert pieces[0] > pieces[2] > pieces[3] == 1


def test_replicas_of_experts_equal_one_process_and_count_once_in_norms(four_ranks: Ranks) -> None:
    assert four_ranks.run(grid_equals_alone) == [[]] * 4


def test_checkpoints_of_all_experts_and_of_a_rank(two_ranks: Ranks) -> None:
    assert two_ranks.run(checkpoints) == [[], []]


def test_data_parallel_leaves_experts_to_their_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(plain_data_parallel) == [([], True)] * 2


@pytest.mark.parametrize("pattern", ["uneven", "some empty", "one rank has none", "none"])
def test_an_all_to_all_has_the_bits_of_torch(pattern: str, three_ranks: Ranks) -> None:
    case = address_of(exchange_equals_torch)
    assert three_ranks.run(by_all_to_all, case, pattern, torch.float32) == [(True, True)] * 3


@pytest.mark.parametrize("kind", ["top1", "top2", "dts"])
def test_the_layer_equals_one_process_by_all_to_alls(kind: str, two_ranks: Ranks) -> None:
    assert two_ranks.run(by_all_to_all, address_of(layer_equals_alone), kind, 4) == [[], []]


def test_a_layer_is_used_in_many_ways_by_all_to_alls(two_ranks: Ranks) -> None:
    for found in two_ranks.run(by_all_to_all, address_of(used_in_many_ways)):
        assert all(found.values()), found
