"""Graphs on several ranks: the results of one process, and errors that all ranks get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import graphs_cases as cases
import pytest
import torch
from exchange_cases import by_all_to_all
from raised import check_survivors
from ranks import Ranks, address_of, run_fresh

KINDS = [
    "directed",
    "empty halos",
    "no inner edges",
    "one way",
    "a rank has no vertices",
    "one rank alone is needed by one",
]


#: ranks, and what they find no difference in to one process, or between pieces
EQUAL: list[tuple[Any, ...]] = [
    *(
        (size, cases.equals_alone, kind, piece_bytes)
        for kind in KINDS
        for size in (2, 4)
        for piece_bytes in (1 << 20, 300)
    ),
    (4, cases.equals_alone, "directed", 64, "features"),
    *((4, cases.bits, dtype) for dtype in (torch.float32, torch.float64)),
    (2, cases.keeps_inputs),
    *((2, cases.trained, piece_bytes) for piece_bytes in (1 << 20, 64)),
    *(
        (3, by_all_to_all, address_of(cases.equals_alone), "directed", piece_bytes, "features")
        for piece_bytes in (1 << 20, 64)
    ),
    (2, by_all_to_all, address_of(cases.trained), 64),
]


@pytest.mark.parametrize("case", EQUAL, ids=lambda case: "-".join(map(str, case[2:])))
@pytest.mark.one_in(3)
def test_graphs_equal_one_process(
    case: tuple[Any, ...], two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks
) -> None:
    size, run, *args = case
    assert (two_ranks, three_ranks, four_ranks)[size - 2].run(run, *args) == [[]] * size


def test_halos_are_cut_alike_on_all_ranks(three_ranks: Ranks) -> None:
    assert three_ranks.run(cases.number_of_pieces, "empty halos", 1) == [0] * 3
    one, *others = three_ranks.run(cases.number_of_pieces, "directed", 1 << 20)
    assert [one, *others] == [2] * 3
    few, *_ = fewer = three_ranks.run(cases.number_of_pieces, "directed", 3 * 40)
    many, *_ = more = three_ranks.run(cases.number_of_pieces, "directed", 1)
    assert fewer == [few] * 3
    assert more == [many] * 3
    assert 2 < few < many


def test_a_trace_says_what_an_epoch_goes_to(two_ranks: Ranks, tmp_path: Path) -> None:
    for shares, under_way, is_told in two_ranks.run(cases.traced, str(tmp_path)):
        assert sum(shares.values()) == pytest.approx(1)
        assert all(shares[kind] > 0 for kind in ("aggregation", "transformation", "halo", "other"))
        assert 0 < under_way < 1
        assert not is_told


def test_ranks_that_disagree_are_told_on_all_of_them_before_anything_is_sent(
    three_ranks: Ranks,
) -> None:
    first, second, last = three_ranks.run(cases.disagreements)
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
    ended = run_fresh(cases.dies_in_an_exchange, 3, timeout_s=50, args=(direction,))
    check_survivors(ended, "task halo")


def test_an_exception_in_the_middle_ends_the_others() -> None:
    ended = run_fresh(cases.raises_in_the_middle, 3, timeout_s=50)
    check_survivors(ended, code=1)
    assert "ValueError: in the middle" in ended[-1].stderr


@pytest.mark.parametrize(
    ("case", "args"),
    [
        (cases.goes_on_elsewhere, ()),
        # Rows of another layer are never taken for those of this one.
        (cases.in_another_layer, ("directed",)),
        (cases.in_another_layer, ("one way",)),
    ],
)
@pytest.mark.one_in(2)
def test_ranks_in_different_layers_give_up_in_time(
    case: Callable[..., None], args: tuple[str, ...]
) -> None:
    limit = {"BYTESCHED_TIMEOUT_S": "2"}
    for rank in run_fresh(case, 2, timeout_s=60, env=limit, args=args):
        assert rank.code == 0, rank.stderr
        assert rank.stdout.startswith(("SchedulerTimeout: ", "PeerLost: ")), rank.stdout
