"""What DDP decides stays DDP's: rounds, whose gradients, settings that change, to the last bit.

Also where a sum does not begin before somebody waits for it: what reads without waiting then reads
this rank's own values.
"""

from __future__ import annotations

from typing import Any

import pytest
import round_ways as ways
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_reading as reading
import scripts_rounds as scripts
from comparing import Figures, Script, cases, check, each, of
from ranks import Ranks, address_of
from training import Job

from bytesched.plugins.figures.meter import ROUNDING, UNSEEN

#: Below a layer, and few enough to be quick.
SIZES: dict[str, Any] = {"partition_bytes": 256, "credit_bytes": 512}
#: Each bucket of DDP's at once: three ranks' sums depend on where a chunk begins.
WHOLE: dict[str, Any] = {"partition_bytes": 0, "credit_bytes": 0}

views = pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
#: every change tries two kinds, of scripts one kind each
views_and_hold = pytest.mark.parametrize(
    ("views", "hold"),
    [
        pytest.param(False, False, id="apart-early"),
        pytest.param(True, True, id="views-held"),
        pytest.param(True, False, id="views-early", marks=pytest.mark.nightly),
        pytest.param(False, True, id="apart-held", marks=pytest.mark.nightly),
    ],
)


def equal(
    ranks: Ranks,
    script: Script,
    views: bool,
    args: list[Any],
    *,
    way: Script | None = None,
    sizes: dict[str, Any] = SIZES,
    **given: Any,
) -> list[Figures]:
    """Each rank's figures."""
    kind = ways.ViewsJob if views else ways.RoundsJob
    if way is None:
        return check(ranks, script, *args, kind=kind, **given, **sizes)
    return check(ranks, way, address_of(script), *args, kind=kind, **given, **sizes)


BOTH = (False, True)
ROUNDS = [
    *of(scripts, "called_around probed_everywhere probed_before_the_step attacked"),
    (scripts.probed_on_one_rank, False),
    *each(scripts.forward_called, BOTH),
    *of(scripts, "forward_for_a_look two_backwards several_forwards"),
    *[(gradients.no_sync,), (optimizers.step_every_other_backward,)],
    *each(scripts.accumulated_with, ("buffers", "unequal", "unused", "static")),
    (optimizers.closure,),
    *of(scripts, "exception_caught checkpointed_twice"),
]
WHOSE = [
    (scripts.frozen, True, "later"),
    (scripts.frozen, False, "before wrap"),
    (models.frozen_for_a_while,),
    *each(scripts.shared_encoder, ("by one", "by one, detached", "by both")),
    (scripts.nested,),
    *each(scripts.rewrapped, ("kept", "dropped")),
    (models.ignored_by_ddp,),
    (scripts.own_group,),
]
BESIDE = [
    *each(scripts.regularised_beside, BOTH),
    *of(scripts, "submodule_beside built_before_and_run_after grad_taken_beside"),
]
SETTINGS = [
    (scripts.unwrapped_and_wrapped,),
    *each(scripts.wrapped_in_the_middle, BOTH),
    (optimizers.parameter_groups,),
    *each(scripts.optimizer_for_each_phase, BOTH),
]
GRADIENTS = [
    *each(gradients.zeroed, ("to_none", "to_zero", "model", "never")),
    *each(gradients.gradients_kept, BOTH),
    *of(gradients, "gradients_read gradients_read_after_step gradients_replaced"),
    *of(gradients, "gradients_written gradients_dropped gradients_zeroed_before_step clip_norm"),
    (scripts.gradients_changed_after_the_step,),
    (optimizers.grad_scaler, "sgd_momentum"),
]
MODELS = [
    (models.unused, "differing_ranks"),
    *each(models.unused_static, BOTH),
    (models.one_model, "checkpoint_reentrant", {"static_graph": True}),
    (models.autocast,),
    *each(models.one_model, ("checkpoint", "checkpoint_reentrant", "tied", "tied_by_data")),
    *each(models.one_model, ("mixed_dtypes", "batch_norm")),
    (scripts.ddp_copied_each_step,),
    *of(reading, "saved state_dicts"),
    *each(scripts.read_elsewhere, ("player", "views", "numpy"), (0, 4)),
]
CROSSING = [*ROUNDS, *WHOSE, *BESIDE, *SETTINGS, *GRADIENTS, *MODELS]
LEFT_TO_DDP = [
    *each(scripts.hook_registered, ("python",), (-1, 0, 4)),
    (scripts.hook_registered, "builtin", 4),
    *each(scripts.in_a_context, (0, 4)),
]


@views_and_hold
@cases(*CROSSING)
@pytest.mark.one_in(2)
def test_script(two_ranks: Ranks, script: Script, args: list[Any], views: bool, hold: bool) -> None:
    equal(two_ranks, script, views, args, way=ways.held if hold else None)


@views_and_hold
@cases(*LEFT_TO_DDP)
@pytest.mark.one_in(2)
def test_left_to_ddp(
    two_ranks: Ranks, script: Script, args: list[Any], views: bool, hold: bool
) -> None:
    """DDP reduces as if it were never wrapped: the session stands aside."""
    equal(two_ranks, script, views, args, way=ways.held if hold else None, mode="plain")


#: With views, what a script keeps of a bucket is written by its reducer alone: see limits.md.
NOT_KEPT = [case for case in CROSSING if case[0] is not gradients.gradients_kept]


@pytest.mark.parametrize(
    "views", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["views", "apart"]
)
@cases(
    *NOT_KEPT,
    *LEFT_TO_DDP,
    *each(scripts.joined, BOTH, (6,)),
)
@pytest.mark.one_in(8)
def test_turns(two_ranks: Ranks, script: Script, args: list[Any], views: bool) -> None:
    """The plan and DDP by itself take turns, whatever the script does."""
    equal(two_ranks, script, views, args, way=ways.taking_turns, mode="", guard=True)


@pytest.mark.parametrize(("verdict", "mode"), [("PLANNED", "cross"), ("PLAIN", "plain")])
def test_a_decision(two_ranks: Ranks, verdict: str, mode: str) -> None:
    """It holds, and all ranks show what it was made from."""
    figures = equal(two_ranks, ways.decided, False, [verdict], mode=mode, guard=True)
    shown = ("plain_ms", "planned_ms", "speedup", "stood_aside", "guard")
    first, second = ([stats[name] for name in shown] for stats in figures)
    assert first == second
    assert first[3] == (verdict == "PLAIN")


def test_ddp_by_itself_for_a_while(two_ranks: Ranks) -> None:
    """Without a hook on the optimizer, and what the script keeps then is known afterwards."""
    equal(two_ranks, ways.aside_and_back, False, [], mode="cross", guard=True)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_the_same_run_twice(three_ranks: Ranks, is_guarded: bool) -> None:
    """Who wins decides how sums of three ranks round, and is said."""
    for rank, (found, said) in enumerate(three_ranks.run(ways.decided_twice, is_guarded)):
        assert bool(found) == is_guarded, found
        assert said == (2 if is_guarded and rank == 0 else 0)


@views
@cases(*ROUNDS)
@pytest.mark.one_in(6)
def test_turns_in_two_halves(
    two_ranks: Ranks, script: Script, args: list[Any], views: bool
) -> None:
    equal(two_ranks, script, views, args, way=ways.taking_turns, mode="", split="on", guard=True)


@views
@cases(*ROUNDS)
@pytest.mark.one_in(4)
def test_rounds_in_two_halves(
    two_ranks: Ranks, script: Script, args: list[Any], views: bool
) -> None:
    figures = equal(two_ranks, script, views, args, split="on")
    assert {stats["order"] for stats in figures} == {"halves"}


@views
@pytest.mark.parametrize("first", [0, 1, 6])
@pytest.mark.one_in(3)
def test_join_in_two_halves(two_ranks: Ranks, views: bool, first: int) -> None:
    equal(two_ranks, scripts.joined, views, [False, first], split="on")


@views
def test_probe_on_one_rank_and_a_barrier(two_ranks: Ranks, views: bool) -> None:
    """Not held: the other rank would not begin what this one waits for."""
    equal(two_ranks, scripts.probed_on_one_rank, views, [True])


@views
@pytest.mark.parametrize("first", [0, 1, 6])
@pytest.mark.parametrize("finds_unused", [False, True])
@pytest.mark.one_in(3)
def test_join(two_ranks: Ranks, views: bool, finds_unused: bool, first: int) -> None:
    """Not held: who has joined waits at once."""
    if finds_unused and not first:
        pytest.skip("plain DDP has other weights each time")
    equal(two_ranks, scripts.joined, views, [finds_unused, first])


#: what is trained under join(), and what its first pass raises
JOINED_IN_VAIN = {
    "divided by those left": "join(divide_by_initial_world_size=False) is not supported",
    "sharded": "shard=True: ranks under join() would miss what others own",
    **dict.fromkeys(("complex", "groups", "AdamA"), "join() shadows DDP's own all-reduces"),
}


@pytest.mark.parametrize("what", JOINED_IN_VAIN)
def test_join_is_refused(two_ranks: Ranks, what: str) -> None:
    for said in two_ranks.run(scripts.joined_in_vain, what):
        assert said.startswith("PluginError: "), said
        assert JOINED_IN_VAIN[what] in said


@pytest.mark.parametrize(
    ("what", "mode"), [("SyncBatchNorm", "plain"), ("a hook for buffers", "backward")]
)
def test_what_keeps_ddps_own_collectives_over_nccl(two_ranks: Ranks, what: str, mode: str) -> None:
    for figures in equal(two_ranks, scripts.begun_over_nccl, False, [what], mode=mode):
        assert mode == "plain" or "a hook for buffers" in str(figures["reason"])


def test_another_back_end_is_refused(two_ranks: Ranks) -> None:
    for said in two_ranks.run(scripts.over_another_back_end):
        assert "backend 'fake' is not supported; gloo and nccl are" in said


@views
def test_sparse_gradients(two_ranks: Ranks, views: bool) -> None:
    equal(two_ranks, models.sparse_gradients, views, [], mode="plain")


@views
@cases(*of(scripts, "complex_numbers complex_and_accumulated"))
def test_complex_numbers(two_ranks: Ranks, script: Script, args: list[Any], views: bool) -> None:
    """Hooks of ours reduce them, not DDP's."""
    equal(two_ranks, script, views, args)


@views
@cases(
    *WHOSE,
    *SETTINGS,
    (models.unused, "differing_ranks"),
    (models.unused_static, False),
    (scripts.ddp_copied_each_step,),
)
@pytest.mark.one_in(4)
def test_buckets_of_ours(two_ranks: Ranks, script: Script, args: list[Any], views: bool) -> None:
    """DDP gets a new reducer, which reduces what the old one did."""
    equal(two_ranks, script, views, args, way=ways.in_buckets_of_ours)


#: After `unwrap` DDP begins with other buckets, as it does when it is made.
IN_BUCKETS_OF_DDP = [case for case in CROSSING if case[0] is not scripts.unwrapped_and_wrapped]


@pytest.mark.parametrize(
    "views", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["views", "apart"]
)
@cases(*IN_BUCKETS_OF_DDP)
@pytest.mark.one_in(8)
def test_three_ranks(three_ranks: Ranks, script: Script, args: list[Any], views: bool) -> None:
    """Buckets of DDP's own size have sums with its bits, where these depend on the cut, too."""
    equal(three_ranks, script, views, args, way=ways.held, sizes=WHOLE)


@pytest.mark.parametrize("how", ["player", "views", "numpy"])
def test_weights_read_elsewhere_on_other_ways(two_ranks: Ranks, how: str) -> None:
    for figures in check(two_ranks, scripts.read_elsewhere, how, 4, module_alone=True):
        assert 0 < int(figures["barrier_crossed_steps"]) < scripts.STEPS - 3


@views
def test_ranks_stay_alike_when_strides_change(two_ranks: Ranks, views: bool) -> None:
    """Plain DDP permutes such gradients, alike on all ranks."""
    (one, reason), (other, _) = two_ranks.run(
        scripts.strides_change, ways.ViewsJob if views else ways.RoundsJob
    )
    assert one == other
    assert ("have got other strides" in reason) == views


def test_a_checkpoint_that_adds_to_a_round_that_is_over_is_refused(two_ranks: Ranks) -> None:
    for text in two_ranks.run(scripts.checkpointed_twice_later, ways.RoundsJob):
        assert text.startswith("PluginError: 'module.first.")
        assert "got another gradient" in text


def says(
    ranks: Ranks,
    text: str,
    script: Script = scripts.plain_module,
    *args: Any,
    kind: type[Job] = ways.RoundsJob,
    **options: Any,
) -> int:
    """How many lines of rank 0 have ``text``; no other rank has any."""
    first, *others = ranks.run(scripts.said, address_of(script), list(args), SIZES | options, kind)
    assert not any(text in line for lines in others for line in lines)
    return sum(text in line for line in first)


@pytest.mark.parametrize("module_alone", [False, True], ids=["ddp", "module"])
def test_what_no_read_shows_is_said_once(two_ranks: Ranks, module_alone: bool) -> None:
    assert says(two_ranks, UNSEEN, module_alone=module_alone) == 1
    assert says(two_ranks, ROUNDING, module_alone=module_alone) == 0


@pytest.mark.parametrize("module_alone", [False, True], ids=["ddp", "module"])
def test_that_sums_of_three_ranks_round_is_said(three_ranks: Ranks, module_alone: bool) -> None:
    assert says(three_ranks, ROUNDING, module_alone=module_alone) == 1
    if not module_alone:
        assert says(three_ranks, ROUNDING, **WHOLE) == 0


def test_that_complex_gradients_are_not_compressed_is_said(two_ranks: Ranks) -> None:
    text = "complex gradients are sent as they are"
    assert says(two_ranks, text, scripts.complex_numbers, compression="fp16") == 1
    assert says(two_ranks, text, scripts.complex_numbers) == 0


@views
def test_that_kept_gradients_are_left_is_said(two_ranks: Ranks, views: bool) -> None:
    text = "gradients lie in other memory from now on"
    kind = ways.ViewsJob if views else ways.RoundsJob
    assert says(two_ranks, text, ways.decided, "PLANNED", kind=kind, guard=True) == views
