"""Training under bytesched is training under plain DDP, to the last bit, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_reading as reading
import scripts_rounds as rounds
import scripts_shard as shard
import scripts_split as split
import soak_cases
from comparing import Script, cases, check, each, of
from ranks import Ranks
from training import STEPS, Job, adamw, mlp, sgd, train

MADE = ("before", "after")
#: how those end that do not cross the barrier
MODES = {
    "lbfgs": "backward",
    "sparse_gradients": "plain",
}


@cases(*((script,) for script in soak_cases.scripts().values()))
@pytest.mark.one_in(2)
def test_script(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    check(two_ranks, script, mode=MODES.get(script.__name__, "cross"))


@cases(
    *each(optimizers.one_optimizer, optimizers.SPLITTABLE),
    *each(optimizers.schedule, optimizers.SCHEDULES, MADE),
    *each(optimizers.grad_scaler, ("sgd_momentum", "sgd_fused", "adamw_foreach", "adamw_fused")),
    *each(gradients.zeroed, gradients.ZEROINGS),
    *each(models.one_model, models.MODELS),
    (models.one_model, "linear", {"gradient_as_bucket_view": True}),
    (models.one_model, "batch_norm", {"broadcast_buffers": False}),
    *each(models.compiled, ("block", "inner", "in_place", "whole"), ("eager", "aot_eager")),
    *each(models.unused, ("same_on_all_ranks", "differing_ranks")),
    *each(optimizers.step_pre_hooks, MADE),
    *each(gradients.user_hooks_after_accumulation, MADE),
    *each(optimizers.one_optimizer, optimizers.OTHERS.keys() - {"unknown"}),
    (optimizers.two_optimizers, False),
    (rounds.rewrapped, "unwrapped"),
    (rounds.frozen, False, "later"),
    (shard.adversaries,),
)
@pytest.mark.one_in(2)
def test_kind(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    """Of optimizers, schedules, ways to zero, models."""
    check(two_ranks, script, *args)


def test_parameters_over_one_memory(two_ranks: Ranks) -> None:
    check(two_ranks, optimizers.over_one_memory, 0.3)


def test_optimizer_that_cannot_be_split(two_ranks: Ranks) -> None:
    check(two_ranks, optimizers.one_optimizer, "unknown", mode="backward")


@pytest.mark.parametrize("name", optimizers.SURROUNDINGS)
def test_step_within(two_ranks: Ranks, name: str) -> None:
    """What a thread has of its own goes to the thread that updates."""
    figures = check(two_ranks, optimizers.stepped_within, name)
    assert all(int(stats["barrier_crossed_steps"]) for stats in figures)


@pytest.mark.parametrize("preset", ["before", "grad", "data", "arrays"])
def test_buffer_of_gradients_of_the_user(two_ranks: Ranks, preset: str) -> None:
    for figures in check(two_ranks, gradients.flat_gradients, preset):
        assert "in memory that others have" in str(figures["reason"])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("views", [False, True], ids=["own", "view"])
def test_compression_equals_the_hook_of_ddp(two_ranks: Ranks, views: bool, dtype: str) -> None:
    figures = check(two_ranks, gradients.compressed, dtype, views)
    assert {stats["order"] for stats in figures} == {"planned"}


@cases(
    *each(models.one_model, ("linear", "tied", "mixed_dtypes", "raw_kernel")),
    *of(models, "different_starts called_by_method"),
    *of(split, "clipped_by_hand changed_out_of_sight aliases_kept"),
    *of(gradients, "gradients_written gradients_seen_through_views gradients_replaced"),
    *of(gradients, "gradients_read gradients_referred_to gradient_data_assigned gradients_kept"),
    *of(gradients, "user_hooks_registered_late"),
)
@pytest.mark.one_in(2)
def test_module_without_ddp(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    """It starts as on the first rank."""
    check(two_ranks, script, *args, module_alone=True)


def test_norms_of_nested_passes_of_a_module_without_ddp(two_ranks: Ranks) -> None:
    script = gradients.norms_of_nested_passes
    check(two_ranks, script, module_alone=True, find_unused_parameters=True)


@pytest.mark.parametrize(
    "options",
    [{"split": "off"}, {"split": "on"}, {"module_alone": True, "find_unused_parameters": True}],
    ids=str,
)
def test_gradients_left_of_unused_parameters(two_ranks: Ranks, options: dict[str, Any]) -> None:
    check(two_ranks, models.unused_with_gradients_left, **options)


@cases(
    *each(models.compiled, ("whole before", "whole after"), ("eager",)),
    nightly=[(models.compiled, "in_place after", "eager")],
)
def test_compiled_after_wrap(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    """Gates made before the compiler came are not seen by it, so nothing may cross."""
    check(two_ranks, script, *args, mode="backward")


@cases(*each(optimizers.step_compiled, ("sgd", "adamw"), ("eager", "aot_eager")))
def test_step_that_is_compiled(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    """It is the user's own, over all parameters."""
    for figures in check(two_ranks, script, *args, mode=""):
        assert figures["barrier_crossed_steps"] == 0


@pytest.mark.parametrize("module_alone", [False, True], ids=["ddp", "module"])
@pytest.mark.parametrize("what", reading.KEPT)
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
    sizes: dict[str, Any] = {
        "partition_bytes": partition_bytes,
        "credit_bytes": 2 * partition_bytes,
    }
    check(two_ranks, plain_script, "sgd", **sizes)


def test_without_crossing(two_ranks: Ranks) -> None:
    check(two_ranks, plain_script, "sgd", mode="backward", cross_barrier=False)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_four_ranks(four_ranks: Ranks, kind: str) -> None:
    """Sums of four depend on where a chunk begins, so equal to a tolerance."""
    check(four_ranks, plain_script, kind, rtol=1e-5)


def test_subgroups(four_ranks: Ranks) -> None:
    check(four_ranks, rounds.own_group)


def test_world_of_one(one_rank: Ranks) -> None:
    check(one_rank, plain_script, "sgd", mode="plain")
