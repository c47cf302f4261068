"""Mixture of experts on several ranks: bits of torch's exchange, results of one process.

Ranks that differ are told, or may; where one raises, stands still or dies, the others hear of it.
"""

from __future__ import annotations

import signal
from typing import Any

import moe_cases as cases
import moe_differing as differing
import pytest
import torch
from exchange_cases import by_all_to_all
from raised import check_survivors
from ranks import Ranks, address_of, run_fresh

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
PATTERNS = ("uneven", "some empty", "one rank has none", "to one alone", "none")
KINDS = ("top1", "top2", "dts")
#: ranks, and what they find no difference in: to torch, to one process, or between two ways
EQUAL: list[tuple[Any, ...]] = [
    *((3, cases.exchange, pattern, dtype) for pattern in PATTERNS for dtype in DTYPES),
    *((2, cases.layer_equals_alone, kind, pieces) for kind in KINDS for pieces in (1, 2, 4, 8)),
    *((4, cases.layer_equals_alone, kind, 2) for kind in ("top2", "dts")),
    # one of them without tokens
    (2, cases.layer_equals_alone, "top1", 2, 1),
    *((2, cases.bits_by_pieces, dtype) for dtype in DTYPES),
    (2, cases.used_in_many_ways),
    # Replicas of experts, which count once in norms.
    (4, cases.grid_equals_alone),
    (2, cases.checkpoints),
    (2, cases.plain_data_parallel),
    # Results have the dtype of tokens, whatever one rank or a wider router makes.
    (2, differing.another_dtype_of_one_rank),
    (2, differing.a_router_in_32_bits),
    (2, differing.infers),
    (2, differing.copied_and_compiled),
]
BY_ALL_TO_ALL: list[tuple[Any, ...]] = [
    *((3, cases.exchange, pattern, torch.float32) for pattern in PATTERNS),
    *((2, cases.layer_equals_alone, kind, 4) for kind in KINDS),
    (2, cases.used_in_many_ways),
]


def named(case: tuple[Any, ...]) -> str:
    ranks, run, *args = case
    return "-".join([run.__name__, str(ranks), *map(str, args)])


@pytest.fixture
def pools(two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks) -> dict[int, Ranks]:
    return {ranks.world_size: ranks for ranks in (two_ranks, three_ranks, four_ranks)}


@pytest.mark.parametrize("case", EQUAL, ids=named)
@pytest.mark.one_in(2)
def test_the_layer_equals_one_process(case: tuple[Any, ...], pools: dict[int, Ranks]) -> None:
    size, run, *args = case
    assert pools[size].run(run, *args) == [[]] * size


@pytest.mark.parametrize("case", BY_ALL_TO_ALL, ids=named)
@pytest.mark.one_in(2)
def test_it_does_so_by_all_to_alls(case: tuple[Any, ...], pools: dict[int, Ranks]) -> None:
    size, run, *args = case
    assert pools[size].run(by_all_to_all, address_of(run), *args) == [[]] * size


def test_ranks_that_disagree_are_told_on_all_of_them_and_go_on(three_ranks: Ranks) -> None:
    first, *others = three_ranks.run(cases.disagreements)
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
    ended = run_fresh(cases.dies_in_a_dispatch, world_size=4, timeout_s=50)
    check_survivors(ended, "task moe dispatch")


def test_volume_and_pieces_fall_with_the_temperature(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(cases.volume_falls)
    assert [pieces for _, pieces in first] == [pieces for _, pieces in second]
    for found in (first, second):
        kept, pieces = zip(*found, strict=True)
        assert kept[0] > kept[1] > kept[2] > kept[3] == 1.0
        assert pieces[0] > pieces[2] > pieces[3] == 1


def test_an_expert_of_another_width_is_an_error_on_all_ranks_which_go_on(
    three_ranks: Ranks,
) -> None:
    first, second, last = three_ranks.run(differing.experts_of_another_width)
    assert last[0].startswith("PluginError: experts of layer")
    for found in (first, second):
        # The other rank that is told closes its connections too: whichever end is seen first.
        assert found[0].startswith("PeerLost: "), found
        assert "rank 2" in found[0].partition(" is gone")[0], found
        assert "rank 2 said: experts of layer" in found[0], found
    assert [found[1] for found in (first, second, last)] == ["no error"] * 3


def test_ranks_in_different_layers_are_told_which(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(differing.layers_in_another_order)
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


def test_experts_are_trained_beside_frozen_ones_of_another_rank(two_ranks: Ranks) -> None:
    for equal, found in two_ranks.run(differing.frozen_on_one_rank):
        assert equal
        assert "rank 1 of the exchange computes without gradients" in found


def test_pieces_are_at_least_one(two_ranks: Ranks) -> None:
    for found in two_ranks.run(differing.bad_arguments):
        assert all(line.startswith("ConfigError: most_pieces = ") for line in found)


@pytest.mark.parametrize(
    ("kind", "error_type"),
    [
        ("first expert", ValueError),
        ("last expert", ValueError),
        ("last expert", KeyboardInterrupt),
        ("gate", ValueError),
    ],
)
def test_an_error_on_one_rank_is_told_to_the_others_which_go_on(
    kind: str, error_type: type[BaseException], four_ranks: Ranks
) -> None:
    *others, last = four_ranks.run(differing.raises_on_one_rank, kind, error_type)
    assert last == ["its own", "no error", 0]
    what = "the gate" if kind == "gate" else "experts"
    for found, *rest in others:
        assert isinstance(found, str)
        assert found.startswith("PeerLost: "), found
        assert f"rank 3 said: {what} of layer " in found, found
        assert f" raised {error_type.__name__}: the weather" in found, found
        assert rest == ["no error", 0]


@pytest.mark.parametrize(
    ("stays", "limit_s", "expected"),
    [
        (False, 100, "PeerLost: rank 1 is gone"),
        (True, 3, "SchedulerTimeout: no progress within 3 s: "),
    ],
)
def test_an_error_in_the_backward_pass_is_known_to_others_late(
    stays: bool, limit_s: int, expected: str
) -> None:
    limit = {"BYTESCHED_TIMEOUT_S": str(limit_s)}
    other, last = run_fresh(differing.raises_in_backward, env=limit, args=(stays,))
    assert last.stdout == "ValueError: the weather\n", last
    assert other.stdout.startswith(expected), other


def test_an_error_in_one_row_of_a_grid_stays_in_it(four_ranks: Ranks) -> None:
    *first_row, (third,), (last,) = four_ranks.run(differing.raises_in_one_row)
    assert first_row == [["no error"], ["no error"]]
    assert third.startswith("PeerLost: rank 3 is gone"), third
    # By its number in the job, as everywhere.
    assert "rank 3 said: experts of layer " in third, third
    assert last == "its own"


@pytest.mark.parametrize(
    ("number", "limit_s", "expected"),
    [
        (signal.SIGSTOP, 4, "SchedulerTimeout: no progress within 4 s: "),
        (signal.SIGKILL, 100, "PeerLost: rank 3 is gone"),
    ],
)
def test_sums_of_expert_gradients_end_at_the_limit_of_exchanges(
    number: int, limit_s: int, expected: str
) -> None:
    """The process group's own limit is 30 s, and a stopped rank is ended by the one that waits."""
    limit = {"BYTESCHED_TIMEOUT_S": str(limit_s)}
    first, second, third, last = run_fresh(
        differing.fails_before_it_reduces, world_size=4, timeout_s=25, env=limit, args=(number,)
    )
    assert last.code == -9
    assert second.code == 0, second.stderr
    assert second.stdout.startswith(expected), second.stdout
    assert "task gradients of experts over ranks 1, 3, seen by rank 1" in second.stdout
    for other in (first, third):
        assert (other.code, other.stdout) == (0, "no error\n"), other.stderr
