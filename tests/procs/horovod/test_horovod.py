"""Training under bytesched is training under plain Horovod, to the last bit, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import horovod_models as models
import horovod_scripts as scripts
import horovod_uses as uses
import pytest
import scripts_gradients
import scripts_models
import scripts_optimizers
import scripts_reading
from dropped_models import dropped_in_turn
from ranks import address_of
from training import STEPS, compare

if TYPE_CHECKING:
    from ranks import Ranks

Pools = Callable[[int], "Ranks"]
Case = tuple[Any, ...]


def check(
    ranks: Ranks, case: Case, *, mode: str = "cross", rtol: float = 0.0, **options: Any
) -> list[dict[str, Any]]:
    """Each rank's figures of the wrapped run, after it was found equal to the plain one."""
    from horovod_training import HorovodJob

    script, *args = case
    run = address_of(script), tuple(args), options, rtol, HorovodJob
    return check_equal(ranks.run(compare, *run), [mode] * ranks.world_size)


def check_equal(outcomes: list[Any], modes: list[str]) -> list[dict[str, Any]]:
    for rank, (found, _) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
    figures = [stats for _, stats in outcomes]
    assert [stats["mode"] for stats in figures] == modes
    return figures


def each(*cases: Case | Callable[..., None]) -> pytest.MarkDecorator:
    """Scripts, alone or with their arguments."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    names = ["-".join([row[0].__name__, *map(str, row[1:])]) for row in rows]
    return pytest.mark.parametrize("case", rows, ids=names)


#: without those that differ from one of these in their update alone, which is the same code
OPTIMIZERS = (
    *("sgd_momentum", "sgd_fused", "adam", "adamw", "adamw_foreach", "adamw_fused"),
    *("rmsprop_centered", "adagrad"),
)
#: one for each way in which a model may hold and use its parameters
MODELS = (
    *("attention", "borrowed_weight", "parameter_list", "batch_norm", "raw_kernel"),
    *("checkpoint", "checkpoint_reentrant", "tied"),
)
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    *({"op": op} for op in ("Sum", "Average")),
    *({"gradient_predivide_factor": factor} for factor in (2.0, 3.0, 0.7)),
    *({"backward_passes_per_step": passes} for passes in (2, 3)),
    *(
        {"groups": groups, "backward_passes_per_step": passes}
        for groups in (1, 3)
        for passes in (1, 2)
    ),
    # Horovod does not divide what it sums in groups beforehand.
    {"groups": 2, "gradient_predivide_factor": 3.0},
)
SCRIPTS: tuple[Case | Callable[..., None], ...] = (
    *((scripts_optimizers.one_optimizer, name) for name in OPTIMIZERS),
    scripts_optimizers.muon,
    scripts_optimizers.lr_by_hand,
    scripts_optimizers.parameter_groups,
    scripts_optimizers.added_group,
    scripts_optimizers.parameters_outside_the_optimizer,
    scripts_optimizers.closure_that_only_looks,
    (uses.scheduled, "step"),
    (uses.scheduled, "one_cycle"),
    (uses.step_hooks, "before"),
    (uses.step_hooks, "after"),
    uses.backward_of_an_older_forward,
    scripts.steps_in_a_row,
    scripts.step_without_backward,
    # between backward and step
    scripts.clipped,
    scripts.clipped_without_synchronize,
    scripts.synchronized_twice,
    scripts.synchronize_alone,
    scripts.zeroed_before_step,
    scripts.zeroed_after_synchronize,
    *((scripts.zeroed, how) for how in scripts.ZEROINGS),
    # several passes
    scripts.accumulation_changed,
    scripts.partial_window,
    (scripts.too_many_backwards, 1),
    (scripts.too_many_backwards, 2),
    models.branching_accumulated,
    models.two_losses_of_parts,
    scripts_gradients.several_forwards_one_backward,
    scripts_gradients.two_losses,
    scripts_gradients.functional_call,
    scripts_gradients.gradient_penalty,
    scripts_gradients.user_gradient_hooks,
    # arguments of Horovod's optimizer
    *((scripts.given, arguments) for arguments in ARGUMENTS),
    scripts.grouped_by_list,
    scripts.grouped_with_others,
    (scripts.double_precision, 1.0),
    (scripts.double_precision, 3.0),
    scripts.half_precision,
    # Each element is rounded alone, and to nearest, also where eight are scaled at once: below what
    # half precision has without loss, and above what it has at all.
    *(
        (scripts.half_on_the_wire, "Average", factor, shift)
        for factor, shift in ((1.0, 1.0), (1.0, 1e-6), (3.0, 1e-6), (0.7, 1.0))
    ),
    (scripts.half_on_the_wire, "Sum", 1.0, 1.0),
    (scripts.half_on_the_wire, "Sum", 1.0, 1e5),
    # models
    *((scripts_models.one_model, name) for name in MODELS),
    models.mixed_dtypes,
    *((models.branching, turns) for turns in models.TURNS),
    *((models.sparse, as_dense, op) for as_dense in (False, True) for op in ("Sum", "Average")),
    (models.sparse, False, "Average", 2),
    (models.sparse, True, "Average", 2),
    models.thawed,
    scripts_models.frozen_for_a_while,
    scripts_models.reused_layer,
    scripts_models.regularised,
    scripts_models.partly_around_ddp,
    scripts_models.evaluated_first,
    scripts_models.autocast,
    (scripts_models.compiled, "block", "eager"),
    models.two_models,
    models.two_optimizers,
    models.one_wrapped_of_two_optimizers,
    # Horovod beside training
    uses.broadcast,
    uses.collectives_of_the_user,
    uses.collectives_without_synchronize,
    # In the first step, before there is a plan, and when there is one and ranks measure again.
    *(
        (uses.joined_early, early, *steps)
        for steps in ((0, 1), (0, 7), (3, 4), (4, 9), (12, 6))
        for early in (0, 1)
    ),
    # between steps
    scripts_reading.weights_read,
    scripts_reading.weights_clipped,
    scripts_reading.weights_replaced,
    scripts_reading.state_changed_after_step,
    scripts_reading.saved,
    scripts_reading.evaluated,
    scripts_reading.averaged_model,
    scripts_reading.deep_copied_optimizer,
    scripts_reading.rolled_back,
    uses.resumed,
    uses.unwrapped_in_the_middle,
    (uses.unwrapped_between_backward_and_step, None, "Sum"),
    (uses.unwrapped_between_backward_and_step, 2, "Sum"),
    uses.scaler_off,
    (uses.scaled, False),
    (uses.scaled, True),
)


@each(*SCRIPTS)
@pytest.mark.one_in(3)
def test_script(hvd_gloo: Pools, case: Case) -> None:
    for figures in check(hvd_gloo(2), case):
        if case[0] is scripts_optimizers.one_optimizer:
            # On a busy machine all sums of a round may be there before step().
            assert 0 < int(figures["barrier_crossed_steps"]) < STEPS


@each(*SCRIPTS)
@pytest.mark.one_in(40)
def test_script_over_mpi(hvd_mpi: Pools, case: Case) -> None:
    check(hvd_mpi(2), case)


def test_an_optimizer_that_cannot_be_split(hvd_gloo: Pools) -> None:
    check(hvd_gloo(2), (scripts_optimizers.subclassed_optimizer,), mode="backward")


ADAMW = (scripts_optimizers.one_optimizer, "adamw")


@pytest.mark.parametrize(
    "options",
    [
        *({"partition_bytes": size, "credit_bytes": 2 * size} for size in (16, 100, 1 << 20, 0)),
        {"policy": "fifo"},
        {"cross_barrier": False},
    ],
    ids=str,
)
def test_settings(hvd_gloo: Pools, options: dict[str, Any]) -> None:
    mode = "cross" if options.get("cross_barrier", True) else "backward"
    check(hvd_gloo(2), ADAMW, mode=mode, **options)


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks(hvd_gloo: Pools, world_size: int) -> None:
    """Where a chunk begins decides which rank adds first, so sums of three round otherwise."""
    from horovod_forked import HorovodRanks

    # Idle ranks take time from others, so not from the fixture.
    with contextlib.closing(HorovodRanks(world_size)) as ranks:
        check(ranks, ADAMW, rtol=1e-5)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_process_set(hvd_gloo: Pools, compression: str) -> None:
    """Of two ranks, so equal to the last bit; the third is outside and trains alone."""
    from horovod_forked import HorovodRanks
    from horovod_training import HorovodJob

    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    with contextlib.closing(HorovodRanks(3, env)) as ranks:
        script = address_of(models.process_set)
        outcomes = ranks.run(compare, script, (compression,), {}, 0.0, HorovodJob)
    check_equal(outcomes, ["cross", "plain", "cross"])


@each(
    (scripts_optimizers.one_optimizer, "adamw_foreach"),
    (scripts.given, {"backward_passes_per_step": 2}),
    scripts.clipped,
    (scripts.given, {"groups": 2}),
    (scripts.half_on_the_wire, "Average", 1.0, 1.0),
    scripts_gradients.gradients_kept,
    scripts_reading.evaluated,
)
@pytest.mark.one_in(3)
def test_sizes_that_change_all_the_time(hvd_gloo: Pools, case: Case) -> None:
    from horovod_training import RestlessHorovodJob

    script, *args = case
    run: Case = address_of(script), tuple(args), {}, 0.0, RestlessHorovodJob
    figures = check_equal(hvd_gloo(2).run(compare, *run), ["cross"] * 2)
    assert int(figures[0]["settings"]) >= 2


@pytest.mark.parametrize("reads", [False, True])
def test_nothing_stays_of_a_model_that_was_dropped(hvd_gloo: Pools, reads: bool) -> None:
    from horovod_training import HorovodJob

    for found in hvd_gloo(2).run(dropped_in_turn, 4, reads, HorovodJob):
        assert not found


def controllers() -> tuple[bool, bool]:
    import horovod.torch as hvd

    return hvd.gloo_enabled(), hvd.mpi_enabled()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gloo", "mpi"])
def test_a_pool_runs_the_controller_it_is_named_after(
    kind: str, request: pytest.FixtureRequest
) -> None:
    pools = request.getfixturevalue(f"hvd_{kind}")
    assert pools(2).run(controllers) == [(kind == "gloo", kind == "mpi")] * 2
