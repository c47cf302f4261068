"""Every hazard of crossing the barrier, one by one: what would go wrong does not.

In most cases no sum begins before somebody waits for it, so that nothing of the step can have
arrived; a read must then wait and see what plain DDP shows, and what reads no value must not wait.

Hazards that need no slow peer to show are cases of test_transparency.py; dead peers and errors in
the middle of backward are in test_faults_*.py.
"""

from __future__ import annotations

from typing import Any

import hazard_endings as endings
import hazard_scripts as hazards
import looks
import pytest
import round_ways as ways
import scripts_gradients as gradients
import scripts_optimizers as optimizers
import scripts_reading as reading
import torch
from comparing import Script, cases, check, each, of
from ranks import Ranks, address_of, run_fresh

#: whole gradients, as those are held, and no turn of plain DDP
HELD: dict[str, Any] = {"split": "off", "guard": False}


def held(ranks: Ranks, script: Script, *args: Any, **options: Any) -> None:
    check(ranks, ways.held, address_of(script), *args, **HELD, **options)


@pytest.mark.parametrize("reader", [0, 1], ids=["rank0_reads", "rank1_reads"])
def test_barrier_is_crossed(two_ranks: Ranks, reader: int) -> None:
    """backward, step, schedule, zero_grad: all done before the peer has begun its backward."""
    figures = check(two_ranks, hazards.crossing, reader)[reader]
    assert int(figures["barrier_crossed_steps"]) >= 3
    assert float(figures["barrier_crossed_pct"]) > 0


#: of the looks of a kind, every change tries one in three
one_in_three = pytest.mark.parametrize("one_in", [3, pytest.param(1, marks=pytest.mark.nightly)])


@one_in_three
@pytest.mark.parametrize("kind", sorted(looks.WITHOUT_VALUES))
def test_metadata_does_not_wait(two_ranks: Ranks, kind: str, one_in: int) -> None:
    """Nor does zero_grad()."""
    held(two_ranks, hazards.looks, kind, one_in)


@one_in_three
@pytest.mark.parametrize("kind", sorted(looks.LOOKS.keys() - looks.WITHOUT_VALUES))
def test_what_shows_values_waits(two_ranks: Ranks, kind: str, one_in: int) -> None:
    held(two_ranks, hazards.looks, kind, one_in)


@cases(
    # Schedulers right after step().
    *of(optimizers, "tensor_lr parameter_groups"),
    *each(optimizers.grad_scaler, ("adamw_foreach", "adamw_fused")),
    *of(gradients, "sync_attribute no_sync"),
    # The step of one arms its own parameters and no others.
    (hazards.two_optimizers,),
)
def test_script(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    held(two_ranks, script, *args)


def test_last_step_is_applied_at_exit() -> None:
    plain = run_fresh(endings.ends_with_a_step, args=(False,))
    wrapped = run_fresh(endings.ends_with_a_step, args=(True,))
    assert [rank.code for rank in plain + wrapped] == [0] * 4, wrapped[0].stderr
    assert [rank.stdout for rank in wrapped] == [rank.stdout for rank in plain]


@pytest.mark.parametrize("name", hazards.UNSEEN)
@pytest.mark.one_in(2)
def test_reader_that_no_tensor_sees(two_ranks: Ranks, name: str) -> None:
    """Modules with parameters and children, a child's weight, tied weights, compiled code."""
    held(two_ranks, hazards.unseen_reader, name)


def test_reentrant_checkpoint_of_a_reused_layer(two_ranks: Ranks) -> None:
    """DDP refuses it unless the graph is static."""
    kinds = two_ranks.run(endings.errors_of_reused)
    assert kinds == [["RuntimeError", "RuntimeError"]] * 2
    check(two_ranks, endings.reused_in_static_graph)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("post_hook", "cross"),
        ("pre_hook", "cross"),
        ("unknown", "backward"),
        ("backward_only", "backward"),
    ],
)
def test_step_that_cannot_be_deferred(two_ranks: Ranks, kind: str, mode: str) -> None:
    """The user's hooks, an unknown optimizer, the barrier asked for."""
    held(two_ranks, hazards.watched_step, kind, mode=mode)


@cases(
    *each(endings.interrupted, ("forward", "before_backward", "before_step", "after_step")),
    # Plain DDP goes on without reducing: who reduces what, DDP decides.
    *each(endings.converted, (torch.float64, torch.bfloat16)),
    # Not again when it is wrapped.
    (hazards.graphs_compiled,),
)
def test_exceptions_conversions_and_compiled_code(
    two_ranks: Ranks, script: Script, args: list[Any]
) -> None:
    check(two_ranks, script, *args)


def test_module_that_is_not_the_ddp(two_ranks: Ranks) -> None:
    """Both would reduce, and the ranks drift apart."""
    for errors in two_ranks.run(endings.errors_of_wrong_modules):
        assert ["DistributedDataParallel" in text for text in errors] == [True, True]


def test_unwrapped_objects_are_let_go(two_ranks: Ranks) -> None:
    assert two_ranks.run(endings.nothing_kept) == [[True] * 3] * 2


@pytest.mark.parametrize("how", reading.PROGRAMS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_programs_made_in_mid_training(two_ranks: Ranks, how: str) -> None:
    for figures in check(two_ranks, reading.program_made, how):
        assert figures["mode"] == "cross"


def test_it_waits_as_long_as_the_group_of_the_script(two_ranks: Ranks) -> None:
    assert two_ranks.run(endings.patience_s) == [[77.0, 55.0]] * 2
