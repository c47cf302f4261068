"""Graphs on several ranks: the results of one process, and errors that all ranks get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from all_to_all_cases import by_all_to_all
from graphs_cases import (
    bits,
    dies_in_an_exchange,
    disagreements,
    equals_alone,
    goes_on_elsewhere,
    in_another_layer,
    keeps_inputs,
    number_of_pieces,
    raises_in_the_middle,
    traced,
    trained,
)
from ranks import Ranks, address_of, run_fresh

pytestmark = pytest.mark.procs

KINDS = [
    "directed",
    "empty halos",
    "no inner edges",
    "one way",
    "a rank has no vertices",
    "one rank alone is needed by one",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(6)
def test_forward_and_backward_equal_one_process(
    kind: str, two_ranks: Ranks, four_ranks: Ranks
) -> None:
    for ranks in (two_ranks, four_ranks):
        for piece_bytes in (1 << 20, 300):
            assert ranks.run(equals_alone, kind, piece_bytes) == [[]] * ranks.world_size


def test_gradients_of_features_equal_one_process(four_ranks: Ranks) -> None:
    assert four_ranks.run(equals_alone, "directed", 64, "features") == [[]] * 4


def test_halos_are_cut_alike_on_all_ranks(three_ranks: Ranks) -> None:
    assert three_ranks.run(number_of_pieces, "empty halos", 1) == [0] * 3
    one, *others = three_ranks.run(number_of_pieces, "directed", 1 << 20)
    assert [one, *others] == [2] * 3
    few, *_ = fewer = three_ranks.run(number_of_pieces, "directed", 3 * 40)
    many, *_ = more = three_ranks.run(number_of_pieces, "directed", 1)
    assert fewer == [few] * 3
    assert more == [many] * 3
    assert 2 < few < many


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.one_in(2)
def test_bits_are_the_same_whatever_the_pieces(dtype: torch.dtype, four_ranks: Ranks) -> None:
    assert four_ranks.run(bits, dtype) == [[True] * 7] * 4


@pytest.mark.parametrize("piece_bytes", [1 << 20, 64])
@pytest.mark.one_in(2)
def test_training_with_wrap_equals_one_process(piece_bytes: int, two_ranks: Ranks) -> None:
    assert two_ranks.run(trained, piece_bytes) == [[], []]


def test_the_first_layer_exchanges_once_while_its_inputs_stay(two_ranks: Ranks) -> None:
    for found in two_ranks.run(keeps_inputs):
        assert len(found) == 9
        assert all(found.values()), found


def test_a_trace_says_what_an_epoch_goes_to(two_ranks: Ranks, tmp_path: Path) -> None:
    for shares, under_way, is_told in two_ranks.run(traced, str(tmp_path)):
        assert sum(shares.values()) == pytest.approx(1)
        assert all(shares[kind] > 0 for kind in ("aggregation", "transformation", "halo", "other"))
        assert 0 < under_way < 1
        assert not is_told


def test_ranks_that_disagree_are_told_on_all_of_them_before_anything_is_sent(
    three_ranks: Ranks,
) -> None:
    first, second, last = three_ranks.run(disagreements)
    assert first == second
    assert len(first) == len(last) == 12
    owners, fewer, far, short, dtype, no_rank, pieces, *rows, after = first
    for told in (owners, fewer, dtype, pieces):
        assert told.startswith("the ranks disagree about the partition: rank 0 has "), told
    for told in (far, short, no_rank):
        assert told.startswith("rank 2 was given no graph to share out, see its own log"), told
    assert "source must be from 0 to 59" in last[2]
    assert "one entry for each edge" in last[3]
    assert "owner must be from 0 to 2" in last[5]
    assert all(told.startswith("rank 2 of the graph has rows that do not fit") for told in rows[:2])
    assert "of width 4 without gradient" in rows[2]
    assert "of width 5 with gradient" in rows[3]
    assert after == "True"


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.one_in(2)
def test_a_rank_that_dies_is_a_named_error_on_all_others(direction: str) -> None:
    *survivors, dead = run_fresh(dies_in_an_exchange, 3, timeout_s=50, args=(direction,))
    assert dead.code == -9
    for survivor in survivors:
        assert survivor.code == 0, survivor.stderr
        assert survivor.stdout.startswith("PeerLost: "), survivor.stdout
        assert "task halo" in survivor.stdout


def test_an_exception_in_the_middle_ends_the_others() -> None:
    *survivors, failed = run_fresh(raises_in_the_middle, 3, timeout_s=50)
    assert failed.code == 1
    assert "ValueError: in the middle" in failed.stderr
    for survivor in survivors:
        assert survivor.code == 0, survivor.stderr
        assert survivor.stdout.startswith("PeerLost: "), survivor.stdout


def test_ranks_in_different_layers_give_up_in_time() -> None:
    limit = {"BYTESCHED_TIMEOUT_S": "2"}
    ended = run_fresh(goes_on_elsewhere, 2, timeout_s=60, env=limit)
    for rank in ended:
        assert rank.code == 0, rank.stderr
        assert rank.stdout.startswith(("SchedulerTimeout: ", "PeerLost: ")), rank.stdout


@pytest.mark.parametrize("kind", ["directed", "one way"])
@pytest.mark.one_in(2)
def test_rows_of_another_layer_are_never_taken_for_those_of_this_one(kind: str) -> None:
    limit = {"BYTESCHED_TIMEOUT_S": "2"}
    ended = run_fresh(in_another_layer, 2, timeout_s=60, env=limit, args=(kind,))
    for rank in ended:
        assert rank.code == 0, rank.stderr
        assert rank.stdout.startswith(("SchedulerTimeout: ", "PeerLost: ")), rank.stdout


def test_results_by_all_to_alls_are_those_of_one_process(three_ranks: Ranks) -> None:
    for piece_bytes in (1 << 20, 64):
        case = ("directed", piece_bytes, "features")
        assert three_ranks.run(by_all_to_all, address_of(equals_alone), *case) == [[]] * 3


def test_training_by_all_to_alls_equals_one_process(two_ranks: Ranks) -> None:
    assert two_ranks.run(by_all_to_all, address_of(trained), 64) == [[], []]
