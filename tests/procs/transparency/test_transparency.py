"""Training under bytesched is training under plain DDP, to the last bit, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_reading as reading
import scripts_split as split
import torch
from comparing import check
from ranks import Ranks
from training import STEPS, Job, adamw, mlp, sgd, train

#: whether this torch has what a script needs, where the oldest one has not
IS_THERE = {
    optimizers.muon: hasattr(torch.optim, "Muon"),
    gradients.clip_by_total_norm: hasattr(torch.nn.utils, "get_total_norm"),
}


def named(
    *scripts: Callable[..., None], more: Sequence[Callable[..., None]] = ()
) -> pytest.MarkDecorator:
    """A test for each; ``more``: nightly, as test_rounds or one of the others does the like."""
    lacking = pytest.mark.skip(reason="not in this torch")
    return pytest.mark.parametrize(
        "script",
        [
            pytest.param(
                each,
                id=each.__name__,
                marks=[
                    *([] if IS_THERE.get(each, True) else [lacking]),
                    *([pytest.mark.nightly] if each in more else []),
                ],
            )
            for each in (*scripts, *more)
        ],
    )


@pytest.mark.parametrize("name", optimizers.SPLITTABLE)
@pytest.mark.one_in(2)
def test_optimizer(two_ranks: Ranks, name: str) -> None:
    check(two_ranks, optimizers.one_optimizer, name)


@pytest.mark.parametrize("name", optimizers.SCHEDULES)
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.one_in(2)
def test_schedule(two_ranks: Ranks, made: str, name: str) -> None:
    check(two_ranks, optimizers.schedule, name, made)


@named(
    optimizers.tensor_lr,
    optimizers.added_group,
    optimizers.two_optimizers,
    optimizers.two_models_of_one_optimizer,
    optimizers.parameters_outside_the_model,
    optimizers.two_steps_in_a_row,
    optimizers.step_skipped,
    optimizers.closure_beside_no_sync,
    optimizers.sharpness_aware,
    optimizers.muon,
    optimizers.beside_one_that_steps_whole,
    optimizers.delegating,
    optimizers.hooks_that_write,
    more=[
        optimizers.lr_by_hand,
        optimizers.plateau,
        optimizers.removed_group,
        optimizers.one_wrapped_of_two_optimizers,
        optimizers.two_models,
        optimizers.parameters_outside_the_optimizer,
        optimizers.step_every_other_backward,
        optimizers.step_without_backward,
        optimizers.closure_that_only_looks,
        optimizers.global_step_hooks,
    ],
)
def test_stepping(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script)


@named(
    optimizers.lbfgs,
    optimizers.unknown_optimizer,
    optimizers.subclassed_optimizer,
)
def test_optimizer_that_cannot_be_split(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script, mode="backward")


@pytest.mark.parametrize("made", ["before", "after"])
def test_step_pre_hooks_of_the_user(two_ranks: Ranks, made: str) -> None:
    check(two_ranks, optimizers.step_pre_hooks, made)


def test_adafactor(two_ranks: Ranks) -> None:
    check(two_ranks, optimizers.adafactor)


@pytest.mark.parametrize("name", optimizers.SURROUNDINGS)
def test_step_within(two_ranks: Ranks, name: str) -> None:
    """What a thread has of its own goes to the thread that updates."""
    figures = check(two_ranks, optimizers.stepped_within, name)
    assert all(int(stats["barrier_crossed_steps"]) for stats in figures)


def test_default_dtype_changed(two_ranks: Ranks) -> None:
    check(two_ranks, optimizers.default_dtype_changed)


def test_step_within_a_mode_of_the_user(two_ranks: Ranks) -> None:
    check(two_ranks, optimizers.mode_around_step)


def test_step_hooks_of_the_user(two_ranks: Ranks) -> None:
    check(two_ranks, optimizers.step_hooks)


@pytest.mark.parametrize("name", ["sgd_momentum", "sgd_fused", "adamw_foreach", "adamw_fused"])
@pytest.mark.one_in(2)
def test_grad_scaler(two_ranks: Ranks, name: str) -> None:
    check(two_ranks, optimizers.grad_scaler, name)


@named(
    gradients.sync_attribute,
    gradients.several_forwards_one_backward,
)
def test_accumulation(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script)


@named(
    gradients.clip_by_total_norm,
    gradients.clip_some,
    more=[
        gradients.clip_value,
    ],
)
def test_clipping(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script)


@named(
    gradients.gradients_written_through_data,
    gradients.user_gradient_hooks,
    gradients.collectives_of_the_user,
    gradients.gradient_data_assigned,
    gradients.gradients_referred_to,
    gradients.gradients_seen_through_views,
    gradients.gradients_kept_by_a_hook,
    gradients.arrays_of_gradients,
    more=[
        gradients.gradients_kept,
    ],
)
def test_gradients_used_between_backward_and_step(
    two_ranks: Ranks, script: Callable[..., None]
) -> None:
    check(two_ranks, script)


@pytest.mark.parametrize("made", ["before", "after"])
def test_user_hooks_after_accumulation(two_ranks: Ranks, made: str) -> None:
    check(two_ranks, gradients.user_hooks_after_accumulation, made)


def test_graph_from_before_the_step(two_ranks: Ranks) -> None:
    check(two_ranks, gradients.old_graph)


@pytest.mark.parametrize("preset", ["before", "grad", "data"])
def test_buffer_of_gradients_of_the_user(two_ranks: Ranks, preset: str) -> None:
    for figures in check(two_ranks, gradients.flat_gradients, preset):
        assert "in memory that others have" in str(figures["reason"])


def test_gradients_over_arrays(two_ranks: Ranks) -> None:
    for figures in check(two_ranks, gradients.gradients_over_arrays):
        assert "in memory that others have" in str(figures["reason"])


@pytest.mark.parametrize("how", gradients.ZEROINGS)
@pytest.mark.one_in(2)
def test_zeroing(two_ranks: Ranks, how: str) -> None:
    check(two_ranks, gradients.zeroed, how)


@named(
    gradients.autograd_grad,
    gradients.functional_call,
    gradients.gradient_penalty,
    gradients.two_losses,
)
def test_autograd(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_compression_equals_the_hook_of_ddp(two_ranks: Ranks, dtype: str) -> None:
    figures = check(two_ranks, gradients.compressed, dtype)
    assert {stats["order"] for stats in figures} == {"planned"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("views", [False, True], ids=["own", "view"])
@pytest.mark.one_in(2)
def test_what_is_compressed_can_be_clipped(two_ranks: Ranks, views: bool, dtype: str) -> None:
    check(two_ranks, gradients.compressed_and_clipped, dtype, views)


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.one_in(2)
def test_model(two_ranks: Ranks, name: str) -> None:
    check(two_ranks, models.one_model, name)


@pytest.mark.parametrize("name", ["linear", "tied", "mixed_dtypes", "raw_kernel"])
def test_module_without_ddp(two_ranks: Ranks, name: str) -> None:
    check(two_ranks, models.one_model, name, module_alone=True)


@named(
    split.clipped_by_hand,
    split.changed_out_of_sight,
    split.aliases_kept,
    gradients.gradients_written_through_data,
    gradients.gradients_seen_through_views,
    gradients.gradients_replaced,
    gradients.gradients_read,
    gradients.gradients_referred_to,
    gradients.gradient_data_assigned,
    gradients.gradients_kept,
    gradients.user_hooks_registered_late,
)
@pytest.mark.one_in(3)
def test_gradients_of_a_module_without_ddp(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script, module_alone=True)


def test_norms_of_nested_passes_of_a_module_without_ddp(two_ranks: Ranks) -> None:
    script = gradients.norms_of_nested_passes
    check(two_ranks, script, module_alone=True, find_unused_parameters=True)


def test_module_without_ddp_starts_as_on_the_first_rank(two_ranks: Ranks) -> None:
    check(two_ranks, models.different_starts, module_alone=True)


def test_module_without_ddp_called_by_method(two_ranks: Ranks) -> None:
    check(two_ranks, models.called_by_method, module_alone=True)


@named(
    models.view_of_buckets,
    models.unused_and_accumulated,
    models.frozen_layer,
    models.unfrozen_under_new_ddp,
    models.reused_layer,
    models.regularised,
    models.partly_around_ddp,
    models.evaluated_first,
    models.work_on_one_rank,
    more=[
        models.no_buffer_broadcast,
        models.unfrozen_in_place,
    ],
)
def test_model_use(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script)


def test_communication_hook_of_the_user(two_ranks: Ranks) -> None:
    check(two_ranks, optimizers.communication_hook, mode="plain")


def test_sparse_gradients(two_ranks: Ranks) -> None:
    check(two_ranks, models.sparse_gradients, mode="plain")


@pytest.mark.parametrize("turns", ["same_on_all_ranks", "differing_ranks"])
def test_unused_parameters(two_ranks: Ranks, turns: str) -> None:
    check(two_ranks, models.unused, turns)


@pytest.mark.parametrize("split", ["off", "on"])
def test_gradients_left_of_unused_parameters(two_ranks: Ranks, split: str) -> None:
    check(two_ranks, models.unused_with_gradients_left, split=split)


@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted(two_ranks: Ranks, how: str) -> None:
    check(two_ranks, models.scripted, how)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["block", "inner", "in_place", "whole"])
@pytest.mark.one_in(4)
def test_compiled(two_ranks: Ranks, what: str, backend: str) -> None:
    check(two_ranks, models.compiled, what, backend)


@pytest.mark.parametrize("what", ["in_place_after", "whole_after"])
@pytest.mark.nightly
def test_compiled_after_wrap(two_ranks: Ranks, what: str) -> None:
    """Gates made before the compiler came are not seen by it, so nothing may cross."""
    check(two_ranks, models.compiled, what, "eager", mode="backward")


@named(
    reading.weights_read,
    reading.metadata_read,
    reading.weights_replaced,
    reading.averaged_model,
    reading.average_in_one_call,
    reading.state_changed_after_step,
    reading.read_by_other_threads,
    reading.read_by_forked_children,
    reading.resumed,
    reading.evaluated,
    more=[
        reading.one_weight_read,
        reading.weights_clipped,
        reading.average_by_hand,
        reading.average_compiled,
        reading.state_read_after_step,
        reading.deep_copied_optimizer,
        reading.converted_at_the_end,
        reading.rolled_back,
        reading.unwrapped_in_the_middle,
    ],
)
def test_reading_and_writing_between_steps(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script)


@pytest.mark.parametrize("module_alone", [False, True], ids=["ddp", "module"])
@pytest.mark.parametrize("what", ["entry", "tensor", "view", "packed"])
@pytest.mark.one_in(2)
def test_state_that_is_kept(two_ranks: Ranks, what: str, module_alone: bool) -> None:
    """Steps are whole as long as it is kept, and no longer."""
    for figures in check(two_ranks, reading.state_kept, what, module_alone=module_alone):
        assert 0 < int(figures["barrier_crossed_steps"]) <= 6


def plain_script(job: Job, kind: str, steps: int = STEPS) -> None:
    model = job.ddp(mlp())
    optimizer = job.wrap({"sgd": sgd, "adamw": adamw}[kind](model), model)
    train(job, model, optimizer, steps=steps)
    job.record_state(model, optimizer)


@pytest.mark.parametrize("module_alone", [False, True])
@pytest.mark.parametrize("policy", ["priority", "fifo", "prophet"])
@pytest.mark.one_in(2)
def test_every_policy(two_ranks: Ranks, policy: str, module_alone: bool) -> None:
    """Long enough for an order to be planned, kept to by all, and planned again."""
    check(two_ranks, plain_script, "sgd", 40, policy=policy, module_alone=module_alone)


@pytest.mark.parametrize("partition_bytes", [16, 100, 1 << 20, 0])
@pytest.mark.one_in(2)
def test_every_cut(two_ranks: Ranks, partition_bytes: int) -> None:
    """Element by element nearly, at odd places, as a whole, and as measured."""
    check(
        two_ranks,
        plain_script,
        "sgd",
        partition_bytes=partition_bytes,
        credit_bytes=2 * partition_bytes,
    )


def test_without_crossing(two_ranks: Ranks) -> None:
    check(two_ranks, plain_script, "sgd", mode="backward", cross_barrier=False)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_four_ranks(four_ranks: Ranks, kind: str) -> None:
    """Sums of four depend on where a chunk begins, so equal to a tolerance."""
    check(four_ranks, plain_script, kind, rtol=1e-5)


def test_subgroups(four_ranks: Ranks) -> None:
    check(four_ranks, models.subgroups)


def test_world_of_one(one_rank: Ranks) -> None:
    check(one_rank, plain_script, "sgd", mode="plain")
