"""With a sharded update, training is still that of plain DDP, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_rounds as rounds
import scripts_shard as shard
import scripts_split as split
import scripts_untaken as unstepped
import torch
from comparing import Script, cases, check, of
from ranks import Ranks
from training import differences

import bytesched


@cases(
    (split.norm_logged, "all"),
    *of(split, "norms_of_parts clipped_by_hand two_optimizers accumulated clipped_and_kept"),
    *of(
        gradients,
        """
        no_sync clip_some gradients_written gradients_replaced
        gradients_dropped gradients_read gradients_zeroed_before_step
        """,
    ),
    *of(
        optimizers,
        """
        parameter_groups added_group tensor_lr two_optimizers parameters_outside_the_model
        parameters_outside_the_optimizer two_steps_in_a_row step_every_other_backward step_skipped
        closure closure_that_only_looks closure_beside_no_sync hooks_that_write
        """,
    ),
    *([(optimizers.muon,)] if hasattr(torch.optim, "Muon") else []),
    (optimizers.one_optimizer, "adafactor"),
    *of(
        unstepped,
        """
        unused_in_between zeroed_in_place scaled_by_each_rank changed_and_flushed some_taken_later
        kept_and_not_read held_and_read_when_unused
        """,
    ),
    *of(
        shard,
        """
        unwrapped_before_step saved_before_a_barrier read_after_step loaded cut_by_kind profiled
        cut_and_tied all_in_closures asked_between_steps dropped_before_backward
        copied_and_pickled adversaries saved_by_all
        """,
    ),
    (models.one_model, "frozen"),
    (rounds.frozen, False, "later"),
    (models.ignored_by_ddp,),
    (models.work_on_one_rank, False),
)
@pytest.mark.one_in(4)
def test_script(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    check(two_ranks, script, *args, shard=True)


@pytest.mark.parametrize("options", [{"shard": True}, {"split": "on"}, {}], ids=str)
def test_models_are_clipped_together(two_ranks: Ranks, options: dict[str, Any]) -> None:
    """No model can say what the gradients of all come to."""
    check(two_ranks, optimizers.two_models_clipped_together, **options)


@cases(
    *of(split, "giant_and_unused clipped_in_a_closure each_clipped_by_itself norm_after_changes"),
    *of(split, "nonfinite_norm"),
    *of(gradients, "clip_norm"),
    *of(shard, "cut_and_clipped hooked_last"),
)
@pytest.mark.one_in(3)
def test_norms_of_tensors_with_several_owners_are_rounded(
    two_ranks: Ranks, script: Script, args: list[Any]
) -> None:
    check(two_ranks, script, *args, shard=True, rtol=1e-5)


@cases(*of(shard, "hooked_last all_in_closures"))
def test_updates_that_do_not_cross(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    check(two_ranks, script, shard=True, mode="backward", rtol=1e-5, cross_barrier=False)


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


@pytest.mark.parametrize("where", ["in a collective", "in another step"])
def test_one_rank_alone_asks_while_the_others_wait_for_it(two_ranks: Ranks, where: str) -> None:
    told, _ = two_ranks.run(shard.asked_while_others_wait, where)
    assert told.startswith("SchedulerTimeout: no progress within 1 s: "), told


def test_models_are_dropped_before_barriers(two_ranks: Ranks) -> None:
    assert two_ranks.run(shard.dropped_before_barriers) == [5, 5]


def test_children_read_no_gradient_of_other_ranks(two_ranks: Ranks) -> None:
    for raised in two_ranks.run(shard.gradients_in_a_child):
        assert "which a forked child cannot ask" in raised


@cases((shard.cut_and_clipped,), (unstepped.unused_in_between,))
def test_more_ranks(three_ranks: Ranks, script: Script, args: list[Any]) -> None:
    check(three_ranks, script, shard=True, rtol=1e-5)


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
    "of another": "is in two optimizers: let go of the first",
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
