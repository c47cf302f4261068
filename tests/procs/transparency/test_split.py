"""With every all-reduce split in two, training is still that of plain DDP, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_split as split
from comparing import check, named
from ranks import Ranks

#: rank 0 leads whole all-reduces, or all ranks repeat an order that has stayed the same
WHOLE = {"leader", "replay"}


def check_split(ranks: Ranks, script: Callable[..., None], *args: object, rtol: float = 0) -> None:
    figures = check(ranks, script, *args, split="on", rtol=rtol)
    # A DDP on two ranks has a plan.
    way = "exchange" if ranks.world_size > 2 else "halves"
    assert {stats["order"] for stats in figures} == {way}


@named(
    split.norm_only_logged,
    split.norm_logged_by_rank_0,
    split.norm_logged_by_rank_0_before_a_barrier,
    split.different_norms,
    split.logged_by_rank_0_before_changes,
    split.changed_out_of_sight,
    split.norms_of_rows,
    split.clipped_by_hand,
    split.clipped_in_a_closure,
    split.clipped_and_named_twice,
    split.parts_of_sums,
    split.squares_kept,
    split.each_clipped_by_itself,
    split.norm_after_changes,
    split.read_between_changes,
    split.nonfinite_norm,
    split.two_optimizers,
    split.accumulated,
    split.aliases_kept,
    split.norms_inside_backward,
    split.clipped_and_kept,
    split.giant_and_unused,
    gradients.clip_norm,
    gradients.clip_by_total_norm,
    gradients.clip_value,
    gradients.clip_some,
    gradients.gradients_scaled_in_place,
    gradients.gradients_written_through_data,
    gradients.gradients_replaced,
    gradients.gradients_dropped,
    gradients.gradients_read,
    gradients.gradients_kept,
    models.frozen_layer,
    optimizers.parameter_groups,
    optimizers.step_skipped,
)
def test_script(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check_split(two_ranks, script)


def test_a_module_without_ddp(two_ranks: Ranks) -> None:
    figures = check(two_ranks, split.clipped_on_the_wire, split="on")
    assert {stats["order"] for stats in figures} == {"exchange"}


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
def test_norms(two_ranks: Ranks, kind: float) -> None:
    check_split(two_ranks, split.norm_of_kind, kind)


@pytest.mark.parametrize("kinds", [range(7), range(7, len(split.BY_HAND))])
def test_numbers_by_hand(two_ranks: Ranks, kinds: range) -> None:
    check_split(two_ranks, split.numbers_by_hand, list(kinds))


@pytest.mark.parametrize("kind", range(len(split.BY_HAND)))
def test_entered_where_all_ranks_look_by_hand(two_ranks: Ranks, kind: int) -> None:
    figures = check(two_ranks, split.numbers_by_hand, [kind], split="auto", module_alone=True)
    assert [stats["order"] for stats in figures] == ["exchange", "exchange"]


@pytest.mark.parametrize("optimizer_of", ["sgd", "adamw"])
def test_infs_of_one_rank(two_ranks: Ranks, optimizer_of: str) -> None:
    check_split(two_ranks, split.scaled_with_infs, optimizer_of)


@pytest.mark.parametrize("kind", [2.0, 3.0, float("inf")])
def test_norms_of_three_ranks(three_ranks: Ranks, kind: float) -> None:
    check_split(three_ranks, split.norm_of_kind, kind, rtol=1e-5)


@named(
    split.clipped_by_hand,
    split.clipped_and_kept,
    split.giant_and_unused,
    split.accumulated,
    split.norm_after_changes,
    split.two_optimizers,
    gradients.clip_value,
)
def test_script_of_three_ranks(three_ranks: Ranks, script: Callable[..., None]) -> None:
    check_split(three_ranks, script, rtol=1e-5)


def test_infs_of_one_rank_of_three(three_ranks: Ranks) -> None:
    check_split(three_ranks, split.scaled_with_infs, "adamw", rtol=1e-5)


@pytest.mark.parametrize(("mode", "orders"), [("auto", {"exchange"}), ("off", WHOLE)])
def test_entered_where_all_ranks_ask(two_ranks: Ranks, mode: str, orders: set[str]) -> None:
    figures = check(two_ranks, split.norm_of_kind, 2.0, split=mode, module_alone=True)
    assert {stats["order"] for stats in figures} <= orders


@named(gradients.clip_value, gradients.gradients_scaled_in_place)
def test_entered_where_all_ranks_change_each_element(
    two_ranks: Ranks, script: Callable[..., None]
) -> None:
    figures = check(two_ranks, script, split="auto", module_alone=True)
    assert [stats["order"] for stats in figures] == ["exchange", "exchange"]


def test_entered_where_all_ranks_unscale(two_ranks: Ranks) -> None:
    figures = check(two_ranks, split.scaled_with_infs, "sgd", split="auto", module_alone=True)
    assert [stats["order"] for stats in figures] == ["exchange", "exchange"]


@named(split.norm_logged_by_rank_0, gradients.gradients_kept)
def test_not_entered_where_one_rank_asks_or_none(
    two_ranks: Ranks, script: Callable[..., None]
) -> None:
    figures = check(two_ranks, script, split="auto", module_alone=True)
    assert {stats["order"] for stats in figures} <= WHOLE


def test_left_when_gradients_are_here_when_they_are_asked_about(two_ranks: Ranks) -> None:
    figures = check(two_ranks, split.clipped_without_a_wait, 40, split="auto", module_alone=True)
    assert {stats["order"] for stats in figures} <= WHOLE


def test_left_when_nothing_is_asked_any_more(two_ranks: Ranks) -> None:
    figures = check(two_ranks, split.clipped_for_a_while, 12, 40, split="auto", module_alone=True)
    assert {stats["order"] for stats in figures} <= WHOLE
