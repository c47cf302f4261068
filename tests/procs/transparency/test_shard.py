"""With a sharded update, training is still that of plain DDP, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_shard as shard
import scripts_split as split
import scripts_untaken as unstepped
import torch
from comparing import check, named
from ranks import Ranks
from training import differences

import bytesched


@named(
    split.norm_only_logged,
    split.norms_of_rows,
    split.clipped_by_hand,
    split.two_optimizers,
    split.accumulated,
    split.clipped_and_kept,
    gradients.no_sync,
    gradients.accumulation_of_averages,
    gradients.clip_value,
    gradients.clip_some,
    gradients.gradients_written_through_data,
    gradients.gradients_replaced,
    gradients.gradients_dropped,
    gradients.gradients_read,
    gradients.gradients_zeroed_before_step,
    models.frozen_layer,
    optimizers.parameter_groups,
    optimizers.added_group,
    optimizers.tensor_lr,
    optimizers.two_optimizers,
    optimizers.parameters_outside_the_model,
    optimizers.parameters_outside_the_optimizer,
    shard.unwrapped_before_step,
    unstepped.unused_in_between,
    unstepped.zeroed_in_place,
    unstepped.scaled_by_each_rank,
    unstepped.changed_and_flushed,
    unstepped.some_taken_later,
    unstepped.kept_and_not_read,
    shard.saved_before_a_barrier,
    models.unfrozen_in_place,
    models.ignored_by_ddp,
    shard.read_after_step,
    shard.loaded,
    shard.cut_by_kind,
    shard.profiled,
    shard.cut_and_tied,
    shard.held_and_read_when_unused,
    shard.all_in_closures,
    shard.asked_between_steps,
    shard.dropped_before_backward,
    shard.copied_and_pickled,
    shard.adversaries,
    optimizers.two_steps_in_a_row,
    optimizers.step_every_other_backward,
    optimizers.step_skipped,
    optimizers.closure,
    optimizers.closure_that_only_looks,
    optimizers.closure_beside_no_sync,
    optimizers.muon,
    optimizers.adafactor,
    optimizers.hooks_that_write,
)
@pytest.mark.one_in(4)
def test_script(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script, shard=True)


@pytest.mark.parametrize("options", [{"shard": True}, {"split": "on"}, {}], ids=str)
def test_models_are_clipped_together(two_ranks: Ranks, options: dict[str, Any]) -> None:
    """No model can say what the gradients of all come to."""
    check(two_ranks, optimizers.two_models_clipped_together, **options)


@named(
    split.giant_and_unused,
    split.clipped_in_a_closure,
    split.each_clipped_by_itself,
    gradients.clip_norm,
    split.norm_after_changes,
    split.nonfinite_norm,
    shard.cut_and_clipped,
    shard.hooked_last,
)
@pytest.mark.one_in(3)
def test_norms_of_tensors_with_several_owners_are_rounded(
    two_ranks: Ranks, script: Callable[..., None]
) -> None:
    check(two_ranks, script, shard=True, rtol=1e-5)


def test_work_on_one_rank(two_ranks: Ranks) -> None:
    check(two_ranks, models.work_on_one_rank, False, shard=True)


def test_unused_in_between_on_three_ranks(three_ranks: Ranks) -> None:
    check(three_ranks, unstepped.unused_in_between, shard=True, rtol=1e-5)


@named(shard.hooked_last, shard.all_in_closures)
def test_updates_that_do_not_cross(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script, False, shard=True, mode="backward", rtol=1e-5)


def test_state_is_held_by_owners_alone(two_ranks: Ranks) -> None:
    held = two_ranks.run(shard.entries_held)
    assert set.union(*held) == set(range(8))
    assert not set.intersection(*held)
    assert all(len(entries) > 1 for entries in held)


def test_memory_is_that_of_a_share(two_ranks: Ranks, three_ranks: Ranks) -> None:
    for ranks in (two_ranks, three_ranks):
        for held, whole in ranks.run(shard.bytes_held):
            assert held <= 1.05 * whole / ranks.world_size


def test_unwrapped_optimizers_have_all_state(two_ranks: Ranks) -> None:
    assert two_ranks.run(shard.entries_after_unwrap) == [(8, True), (8, True)]


def test_state_of_others_does_not_look_empty(two_ranks: Ranks) -> None:
    for found in two_ranks.run(shard.state_of_others):
        assert "before" in found.pop("own")
        assert found.keys() == {"eval", "read", "looked for", "written", "all"}
        for raised in found.values():
            assert "is wholly or partly on other ranks (shard=True)" in raised
            assert "optimizer.state_dict() returns all of it" in raised


def test_one_rank_alone_reads_no_gradient(two_ranks: Ranks) -> None:
    for raised in two_ranks.run(shard.read_by_one_rank):
        assert "rank 0 reads gradients of backward pass 3" in raised
        assert "rank 1 is in call 3 of step(), after 3 backward passes" in raised


def test_one_rank_asks_when_the_others_have_let_go(two_ranks: Ranks) -> None:
    assert two_ranks.run(shard.asked_when_others_have_let_go) == [8, 0]


def test_models_are_dropped_before_barriers(two_ranks: Ranks) -> None:
    assert two_ranks.run(shard.dropped_before_barriers) == [5, 5]


def test_children_read_no_gradient_of_other_ranks(two_ranks: Ranks) -> None:
    for raised in two_ranks.run(shard.gradients_in_a_child):
        assert "which a forked child cannot ask" in raised


def test_more_ranks(three_ranks: Ranks) -> None:
    check(three_ranks, shard.cut_and_clipped, shard=True, rtol=1e-5)


def test_saved_on_three_ranks_loaded_on_two_and_plain(
    three_ranks: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    path = str(tmp_path / "optimizer.pt")
    three_ranks.run(shard.saved, path)
    check(two_ranks, shard.loaded_from, path, shard=True)


def test_shards_saved_on_two_ranks_are_loaded_on_three_and_plain(
    two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path
) -> None:
    path = str(tmp_path / "shards")
    two_ranks.run(shard.shards_saved, path)
    whole = torch.load(f"{path}/whole.pt")
    plain = two_ranks.run(shard.shards_loaded_plain, path)
    for loaded in [*three_ranks.run(shard.shards_loaded, path), *plain]:
        assert not list(differences(whole, loaded, "state"))


def test_shards_are_those_of_a_sharded_optimizer() -> None:
    with pytest.raises(bytesched.PluginError, match="was not wrapped with shard=True"):
        bytesched.sharded_state(torch.optim.SGD([torch.zeros(1)], lr=0.1))


REFUSED = {
    "early shards": "no rank owns anything before the first backward pass",
    "late optimizer": "wrap every optimizer of a model before its first backward pass",
    "nameless shards": "a parameter of shape (3,) is in the optimizer and not in the wrapped model",
    "other strides": "was given strides (1, 77), it had (95, 1)",
    "lbfgs": "shard=True needs an optimizer that can update a part alone: LBFGS",
    "over one memory": "parameters 'module.0.weight' and 'module.1.weight' are over one memory",
    "named twice": "can update a part alone: a group names a parameter twice",
}


def test_what_it_cannot_do_is_refused(two_ranks: Ranks) -> None:
    for found in two_ranks.run(shard.refusals):
        assert found.keys() == REFUSED.keys()
        for what, why in REFUSED.items():
            assert found[what].startswith("PluginError: ")
            assert why in found[what]
