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
from ranks import address_of
from training import STEPS

if TYPE_CHECKING:
    from ranks import Ranks

Pools = Callable[[int], "Ranks"]
Figures = dict[str, int | float | str]
pytestmark = pytest.mark.procs


def check(
    ranks: Ranks,
    script: Callable[..., None],
    *args: Any,
    mode: str = "cross",
    rtol: float = 0.0,
    **options: Any,
) -> list[Figures]:
    """Each rank's figures of the wrapped run, after it was found equal to the plain one."""
    from horovod_training import compare

    outcomes = ranks.run(compare, address_of(script), args, options, rtol)
    for rank, (found, _) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
    figures = [stats for _, stats in outcomes]
    assert [stats["mode"] for stats in figures] == [mode] * ranks.world_size
    return figures


def each(*cases: tuple[Any, ...] | Callable[..., None]) -> pytest.MarkDecorator:
    """Scripts, alone or with their arguments."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    names = ["-".join([row[0].__name__, *map(str, row[1:])]) for row in rows]
    return pytest.mark.parametrize("case", rows, ids=names)


#: without those that differ from one of these in their update alone, which is the same code
OPTIMIZERS = (
    *("sgd_momentum", "sgd_fused", "adam", "adamw", "adamw_foreach", "adamw_fused"),
    *("rmsprop_centered", "adagrad"),
)


@each(*((scripts_optimizers.one_optimizer, name) for name in OPTIMIZERS))
@pytest.mark.one_in(2)
def test_optimizer(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    for figures in check(hvd_gloo(2), *case):
        # On a busy machine all sums of a round may be there before step().
        assert 0 < int(figures["barrier_crossed_steps"]) < STEPS


@each(scripts_optimizers.muon)
def test_optimizer_of_whole_parameters(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_gloo(2), *case)


@each(scripts_optimizers.subclassed_optimizer)
def test_optimizer_that_cannot_be_split(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_gloo(2), *case, mode="backward")


@each(
    (uses.scheduled, "step"),
    (uses.scheduled, "one_cycle"),
    scripts_optimizers.lr_by_hand,
    scripts_optimizers.parameter_groups,
    scripts_optimizers.added_group,
    scripts_optimizers.parameters_outside_the_optimizer,
    (uses.step_hooks, "before"),
    (uses.step_hooks, "after"),
    scripts.steps_in_a_row,
    scripts.step_without_backward,
    scripts_optimizers.closure_that_only_looks,
    uses.backward_of_an_older_forward,
)
@pytest.mark.one_in(3)
def test_stepping(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_gloo(2), *case)


@each(
    scripts.clipped,
    scripts.clipped_without_synchronize,
    scripts.synchronized_twice,
    scripts.synchronize_alone,
    scripts.zeroed_before_step,
    scripts.zeroed_after_synchronize,
    *((scripts.zeroed, how) for how in scripts.ZEROINGS),
)
@pytest.mark.one_in(3)
def test_between_backward_and_step(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_gloo(2), *case)


@each(
    *((scripts.accumulated, passes) for passes in (1, 2, 3)),
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
)
@pytest.mark.one_in(3)
def test_backward(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_gloo(2), *case)


@each(
    (scripts.reduced_by, "Sum"),
    (scripts.reduced_by, "Average"),
    *((scripts.predivided, factor) for factor in (2.0, 3.0, 0.7)),
    *((scripts.grouped, groups, passes) for groups in (1, 3) for passes in (1, 2)),
    scripts.grouped_by_list,
    scripts.grouped_and_predivided,
    scripts.grouped_with_others,
    (scripts.double_precision, 1.0),
    (scripts.double_precision, 3.0),
    scripts.half_precision,
)
@pytest.mark.one_in(3)
def test_arguments(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_gloo(2), *case)


HALVES = (
    (scripts.half_on_the_wire, "Average", 1.0, 1.0),
    # Below what half precision has without loss, and above what it has at all.
    (scripts.half_on_the_wire, "Average", 1.0, 1e-6),
    (scripts.half_on_the_wire, "Average", 3.0, 1e-6),
    (scripts.half_on_the_wire, "Average", 0.7, 1.0),
    (scripts.half_on_the_wire, "Sum", 1.0, 1.0),
    (scripts.half_on_the_wire, "Sum", 1.0, 1e5),
)


@each(*HALVES)
def test_half_precision_on_the_wire(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    """Each element is rounded alone, and to nearest, also where eight are scaled at once."""
    check(hvd_gloo(2), *case)


#: one for each way in which a model may hold and use its parameters
MODELS = (
    *("attention", "borrowed_weight", "parameter_list", "batch_norm", "raw_kernel"),
    *("checkpoint", "checkpoint_reentrant"),
)


@each(
    *((scripts_models.one_model, name) for name in MODELS),
    models.mixed_dtypes,
    *((models.branching, turns) for turns in models.TURNS),
    (scripts_models.one_model, "tied"),
    models.frozen_and_thawed,
    *((models.sparse, as_dense, op) for as_dense in (False, True) for op in ("Sum", "Average")),
    (models.sparse_accumulated, False),
    (models.sparse_accumulated, True),
    scripts_models.reused_layer,
    scripts_models.regularised,
    scripts_models.partly_around_ddp,
    scripts_models.evaluated_first,
    scripts_models.autocast,
    (scripts_models.compiled, "block", "eager"),
)
@pytest.mark.one_in(4)
def test_model(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_gloo(2), *case)


@each(models.two_models, models.two_optimizers, models.one_wrapped_of_two_optimizers)
def test_several_optimizers(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_gloo(2), *case)


JOINED = ((0, 1), (0, 7), (3, 4), (4, 9), (12, 6))


@each(
    uses.broadcast,
    uses.collectives_of_the_user,
    uses.collectives_without_synchronize,
    # In the first step, before there is a plan, and when there is one and ranks measure again.
    *((uses.joined_early, early, *steps) for steps in JOINED for early in (0, 1)),
)
@pytest.mark.one_in(2)
def test_horovod_beside_training(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_gloo(2), *case)


@each(
    scripts_reading.weights_read,
    scripts_reading.weights_clipped,
    scripts_reading.weights_replaced,
    scripts_reading.state_changed_after_step,
    scripts_reading.saved,
    scripts_reading.evaluated,
    scripts_reading.averaged_model,
    scripts_reading.deep_copied_optimizer,
    uses.resumed,
    scripts_reading.rolled_back,
    uses.unwrapped_in_the_middle,
    (uses.unwrapped_between_backward_and_step, None, "Sum"),
    (uses.unwrapped_between_backward_and_step, 2, "Sum"),
    uses.scaler_off,
    (uses.scaled, False),
    (uses.scaled, True),
)
@pytest.mark.one_in(3)
def test_reading_and_writing_between_steps(hvd_gloo: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_gloo(2), *case)


@pytest.mark.parametrize("partition_bytes", [16, 100, 1 << 20, 0])
def test_every_cut(hvd_gloo: Pools, partition_bytes: int) -> None:
    check(
        hvd_gloo(2),
        scripts_optimizers.one_optimizer,
        "adamw",
        partition_bytes=partition_bytes,
        credit_bytes=2 * partition_bytes,
    )


def test_fifo(hvd_gloo: Pools) -> None:
    check(hvd_gloo(2), scripts_optimizers.one_optimizer, "adamw", policy="fifo")


def test_without_crossing(hvd_gloo: Pools) -> None:
    check(hvd_gloo(2), scripts_reading.averaged_model, mode="backward", cross_barrier=False)


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks(hvd_gloo: Pools, world_size: int) -> None:
    """Where a chunk begins decides which rank adds first, so sums of three round otherwise."""
    from horovod_forked import HorovodRanks

    # Idle ranks take time from others, so not from the fixture.
    with contextlib.closing(HorovodRanks(world_size)) as ranks:
        check(ranks, scripts_optimizers.one_optimizer, "adamw", rtol=1e-5)


@each(
    (scripts_optimizers.one_optimizer, "sgd_momentum"),
    (models.sparse, False, "Average"),
    (uses.joined_early, 0, 3, 4),
)
def test_mpi(hvd_mpi: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_mpi(2), *case)


@pytest.mark.nightly
@pytest.mark.slow
@each(
    *((scripts_optimizers.one_optimizer, name) for name in ("adam", "adamw_fused")),
    (scripts.accumulated, 2),
    scripts.clipped,
    scripts.synchronized_twice,
    scripts.step_without_backward,
    (scripts.predivided, 3.0),
    (scripts.grouped, 3, 2),
    (scripts.double_precision, 3.0),
    *HALVES,
    (models.branching, "differing_ranks"),
    models.two_losses_of_parts,
    (models.sparse, True, "Sum"),
    models.two_models,
    models.two_optimizers,
    uses.broadcast,
    uses.collectives_without_synchronize,
    (uses.joined_early, 1, 0, 2),
    uses.resumed,
    uses.unwrapped_in_the_middle,
    (uses.scaled, True),
)
def test_more_over_mpi(hvd_mpi: Pools, case: tuple[Any, ...]) -> None:
    check(hvd_mpi(2), *case)
