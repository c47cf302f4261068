"""Training under bytesched is training under plain Horovod, to the last bit, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import comparing
import horovod_scripts as scripts
import horovod_uses as uses
import pytest
import scripts_gradients
import scripts_models
import scripts_optimizers
import scripts_reading
from comparing import Case, Figures, Script, cases, each, of
from dropped_models import dropped_in_turn
from horovod_launched import run_fresh_horovod, why_missing
from ranks import address_of
from run_outcomes import Outcomes, outcomes
from training import STEPS, compare

if TYPE_CHECKING:
    from ranks import Ranks

Pools = Callable[[int], "Ranks"]


def check(ranks: Ranks, script: Script, *args: Any, **options: Any) -> list[Figures]:
    from horovod_training import HorovodJob

    return comparing.check(ranks, script, *args, kind=HorovodJob, **options)


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
BOTH = (False, True)
SCRIPTS: list[Case] = [
    *each(scripts_optimizers.one_optimizer, OPTIMIZERS),
    *of(scripts_optimizers, "muon lr_by_hand parameter_groups added_group closure_that_only_looks"),
    *of(scripts_optimizers, "parameters_outside_the_optimizer step_without_backward"),
    *each(scripts_optimizers.schedule, ("step", "one_cycle"), ("before",)),
    *each(uses.step_hooks, ("before", "after")),
    *of(uses, "backward_of_an_older_forward"),
    *of(scripts, "steps_in_a_row"),
    # between backward and step
    *of(scripts, "clipped clipped_without_synchronize synchronized_twice synchronize_alone"),
    *of(scripts, "zeroed_before_step zeroed_after_synchronize"),
    *each(scripts_gradients.zeroed, ("model", "by_hand_to_none", "by_hand_to_zero", "never")),
    # several passes
    *of(scripts, "accumulation_changed partial_window"),
    *each(scripts.too_many_backwards, (1, 2)),
    *of(uses, "branching_accumulated two_losses_of_parts"),
    *of(scripts_gradients, "several_forwards_one_backward two_losses functional_call"),
    *of(scripts_gradients, "gradient_penalty user_gradient_hooks"),
    # arguments of Horovod's optimizer
    *each(scripts.given, ARGUMENTS),
    *of(scripts, "grouped_by_list grouped_with_others half_precision"),
    *each(scripts.double_precision, (1.0, 3.0)),
    # Each element is rounded alone, and to nearest, also where eight are scaled at once: below what
    # half precision has without loss, and above what it has at all.
    *(
        (scripts.half_on_the_wire, "Average", factor, shift)
        for factor, shift in ((1.0, 1.0), (1.0, 1e-6), (3.0, 1e-6), (0.7, 1.0))
    ),
    *each(scripts.half_on_the_wire, ("Sum",), (1.0,), (1.0, 1e5)),
    # models
    *each(scripts_models.one_model, MODELS),
    *of(uses, "mixed_dtypes thawed"),
    *each(uses.branching, uses.TURNS),
    *each(uses.sparse, BOTH, ("Sum", "Average")),
    *each(uses.sparse, BOTH, ("Average",), (2,)),
    *of(scripts_models, "frozen_for_a_while reused_layer regularised partly_around_ddp"),
    *of(scripts_models, "evaluated_first autocast"),
    (scripts_models.compiled, "block", "eager"),
    *of(uses, "two_models"),
    *each(uses.two_optimizers, BOTH),
    # Horovod beside training
    *of(uses, "broadcast collectives_of_the_user collectives_without_synchronize"),
    # In the first step, before there is a plan, and when there is one and ranks measure again.
    *(
        (uses.joined_early, early, *steps)
        for steps in ((0, 1), (0, 7), (3, 4), (4, 9), (12, 6))
        for early in (0, 1)
    ),
    # between steps
    *of(scripts_reading, "weights_read weights_replaced state_changed_after_step saved evaluated"),
    *of(scripts_reading, "averaged_model state_dicts rolled_back"),
    *of(uses, "resumed unwrapped_in_the_middle"),
    *each(uses.unwrapped_between_backward_and_step, (None, 2), ("Sum",)),
    *each(uses.scaled, ("plain", "fused", "off")),
]


@cases(*SCRIPTS)
@pytest.mark.one_in(3)
def test_script(hvd_gloo: Pools, script: Script, args: list[Any]) -> None:
    for figures in check(hvd_gloo(2), script, *args):
        if script is scripts_optimizers.one_optimizer:
            # On a busy machine all sums of a round may be there before step().
            assert 0 < int(figures["barrier_crossed_steps"]) < STEPS


@pytest.fixture(scope="module")
def over_mpi(request: pytest.FixtureRequest) -> list[Outcomes]:
    """What came of the selected scripts on each rank, all in one run: launchers take seconds."""
    if reason := why_missing("mpi"):
        pytest.skip(reason)
    from horovod_training import compare_over_mpi

    name = test_script_over_mpi.__name__
    chosen = [one.callspec for one in request.session.items if one.originalname == name]  # type: ignore[attr-defined]
    runs = {one.id: (address_of(one.params["script"]), one.params["args"]) for one in chosen}
    exits = run_fresh_horovod(compare_over_mpi, "mpi", timeout_s=250, args=(runs,))
    return [outcomes(rank) for rank in exits.ranks]


@cases(*SCRIPTS)
@pytest.mark.one_in(40)
def test_script_over_mpi(
    over_mpi: list[Outcomes], request: pytest.FixtureRequest, script: Script, args: list[Any]
) -> None:
    for found in over_mpi:
        case = found[request.node.callspec.id]
        assert (case["found"], case["mode"]) == ([], "cross")


def test_an_optimizer_that_cannot_be_split(hvd_gloo: Pools) -> None:
    check(hvd_gloo(2), scripts_optimizers.one_optimizer, "unknown", mode="backward")


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
    check(hvd_gloo(2), *ADAMW, mode=mode, **options)


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks(hvd_gloo: Pools, world_size: int) -> None:
    """Where a chunk begins decides which rank adds first, so sums of three round otherwise."""
    from horovod_forked import HorovodRanks

    # Idle ranks take time from others, so not from the fixture.
    with contextlib.closing(HorovodRanks(world_size)) as ranks:
        check(ranks, *ADAMW, rtol=1e-5)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_process_set(hvd_gloo: Pools, compression: str) -> None:
    """Of two ranks, so equal to the last bit; the third is outside and trains alone."""
    from horovod_forked import HorovodRanks
    from horovod_training import HorovodJob

    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    with contextlib.closing(HorovodRanks(3, env)) as ranks:
        script = address_of(uses.process_set)
        outcomes = ranks.run(compare, script, (compression,), {}, 0.0, HorovodJob)
    assert [found for found, _ in outcomes] == [[]] * 3
    assert [stats["mode"] for _, stats in outcomes] == ["cross", "plain", "cross"]


@cases(
    (scripts_optimizers.one_optimizer, "adamw_foreach"),
    *each(scripts.given, ({"backward_passes_per_step": 2}, {"groups": 2})),
    (scripts.clipped,),
    (scripts.half_on_the_wire, "Average", 1.0, 1.0),
    (scripts_gradients.gradients_kept,),
    (scripts_reading.evaluated,),
)
@pytest.mark.one_in(3)
def test_sizes_that_change_all_the_time(hvd_gloo: Pools, script: Script, args: list[Any]) -> None:
    from horovod_training import RestlessHorovodJob

    leader, _ = comparing.check(hvd_gloo(2), script, *args, kind=RestlessHorovodJob)
    assert int(leader["settings"]) >= 2


@pytest.mark.parametrize("reads", [False, True])
def test_nothing_stays_of_a_model_that_was_dropped(hvd_gloo: Pools, reads: bool) -> None:
    from horovod_training import HorovodJob

    for found in hvd_gloo(2).run(dropped_in_turn, 4, reads, HorovodJob):
        assert not found
