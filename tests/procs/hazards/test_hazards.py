"""Every hazard of crossing the barrier, one by one: what would go wrong does not.

In most cases the peer is held before its backward pass, so that nothing of the step can have
arrived; a read must then wait and see what plain DDP shows, and what reads no value must not wait.

Hazards that need no slow peer to show are cases of test_transparency.py: schedulers that patch
`step` (test_schedule), tied, unused, frozen and unfrozen parameters (test_model, test_model_use),
`autograd.grad`, functional calls, double backward (test_autograd), closures (test_stepping),
optimizers that cannot be split, foreach and fused ones, sparse gradients, compiled modules. Dead
peers and errors in the middle of backward are in test_faults_*.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import hazard_endings as endings
import hazard_scripts as hazards
import looks
import pytest
import torch
import unseen_models
from comparing import check
from ranks import Ranks, run_fresh

READERS = pytest.mark.parametrize("reader", [0, 1], ids=["rank0_reads", "rank1_reads"])


def by_turns(names: Iterable[str]) -> pytest.MarkDecorator:
    """Every look once: the first by rank 0, the second by rank 1, and so on."""
    return pytest.mark.parametrize(
        ("name", "reader"), [(name, turn % 2) for turn, name in enumerate(names)]
    )


def look(ranks: Ranks, kind: str, name: str, reader: int, *, waits: bool) -> None:
    patience_s = hazards.SHORT_S if waits else hazards.LONG_S
    figures = check(ranks, hazards.one_look, kind, name, reader, patience_s)
    assert figures[reader]["waited"] == waits


@READERS
def test_barrier_is_crossed(two_ranks: Ranks, reader: int) -> None:
    """backward, step, schedule, zero_grad: all done before the peer has begun its backward."""
    figures = check(two_ranks, hazards.crossing, reader)[reader]
    assert int(figures["barrier_crossed_steps"]) >= 3
    assert float(figures["barrier_crossed_pct"]) > 0


@by_turns(looks.METADATA)
def test_metadata_does_not_wait(two_ranks: Ranks, name: str, reader: int) -> None:
    look(two_ranks, "metadata", name, reader, waits=False)


@pytest.mark.parametrize("name", looks.GRADIENT_METADATA)
def test_metadata_of_gradients_does_not_wait(two_ranks: Ranks, name: str) -> None:
    look(two_ranks, "gradient_metadata", name, 0, waits=False)


@READERS
@pytest.mark.parametrize("lr", ["float", "tensor"])
def test_lr_scheduler_right_after_step(two_ranks: Ranks, lr: str, reader: int) -> None:
    check(two_ranks, hazards.schedule, reader, lr)


@by_turns(looks.CLIPPINGS)
def test_clipping_between_backward_and_step(two_ranks: Ranks, name: str, reader: int) -> None:
    look(two_ranks, "clippings", name, reader, waits=True)


@READERS
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_grad_scaler(two_ranks: Ranks, reader: int, fused: bool) -> None:
    figures = check(two_ranks, hazards.grad_scaler, reader, fused)
    assert figures[reader]["waited"] == 1


@READERS
def test_accumulation_with_no_sync(two_ranks: Ranks, reader: int) -> None:
    figures = check(two_ranks, hazards.accumulated, reader)
    assert figures[reader]["waited"] == 1


@by_turns(looks.GRADIENT_READS)
def test_gradient_read_after_backward(two_ranks: Ranks, name: str, reader: int) -> None:
    look(two_ranks, "gradient_reads", name, reader, waits=True)


@by_turns(looks.WEIGHT_READS)
def test_parameter_read_after_step(two_ranks: Ranks, name: str, reader: int) -> None:
    look(two_ranks, "weight_reads", name, reader, waits=True)


@by_turns(looks.UNASKED)
@pytest.mark.parametrize("kind", ["weights_unasked", "gradients_unasked"])
def test_reader_that_asks_no_class(two_ranks: Ranks, kind: str, name: str, reader: int) -> None:
    look(two_ranks, kind, name, reader, waits=True)


@pytest.mark.parametrize("name", looks.AFTER_A_FLUSH)
def test_unseen_constructor_needs_a_flush(two_ranks: Ranks, name: str) -> None:
    look(two_ranks, "after_a_flush", name, 0, waits=True)


@by_turns(looks.CHECKPOINTS)
def test_checkpoint(two_ranks: Ranks, name: str, reader: int) -> None:
    look(two_ranks, "checkpoints", name, reader, waits=True)


@by_turns(looks.EVALUATIONS)
def test_evaluation(two_ranks: Ranks, name: str, reader: int) -> None:
    look(two_ranks, "evaluations", name, reader, waits=True)


def test_last_step_is_applied_at_exit() -> None:
    plain = run_fresh(endings.ends_with_a_step, args=(False,))
    wrapped = run_fresh(endings.ends_with_a_step, args=(True,))
    assert [rank.code for rank in plain + wrapped] == [0] * 4, wrapped[0].stderr
    assert [rank.stdout for rank in wrapped] == [rank.stdout for rank in plain]


@pytest.mark.parametrize("how", ["to_none", "to_zero"])
def test_zero_grad_after_step(two_ranks: Ranks, how: str) -> None:
    for reader in (0, 1):
        look(two_ranks, "metadata", f"zero_grad_{how}", reader, waits=False)


@pytest.mark.parametrize("name", unseen_models.MODELS)
def test_reader_that_no_tensor_sees(two_ranks: Ranks, name: str) -> None:
    """Modules with parameters and children, a child's weight, tied weights, compiled code."""
    figures = check(two_ranks, hazards.unseen_reader, name, 0)
    assert figures[0]["waited"] == 1


def test_reentrant_checkpoint_of_a_reused_layer(two_ranks: Ranks) -> None:
    """DDP refuses it unless the graph is static."""
    kinds = two_ranks.run(endings.errors_of_reused)
    assert kinds == [["RuntimeError", "RuntimeError"]] * 2
    check(two_ranks, endings.reused_in_static_graph)


def test_two_backwards_per_step(two_ranks: Ranks) -> None:
    """DDP adds a local gradient, whatever one thinks of it."""
    check(two_ranks, endings.second_backward)


def test_compiled_code_is_compiled_once(two_ranks: Ranks) -> None:
    check(two_ranks, hazards.graphs_compiled)


def test_several_optimizers(two_ranks: Ranks) -> None:
    figures = check(two_ranks, hazards.two_optimizers, 0)
    assert (figures[0]["waited_other"], figures[0]["waited"]) == (0, 1)


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
    figures = check(two_ranks, hazards.watched_step, 0, kind, mode=mode)
    assert figures[0]["waited"] == 1


@pytest.mark.parametrize("where", ["forward", "before_backward", "before_step", "after_step"])
def test_exception_in_the_middle_of_a_step(two_ranks: Ranks, where: str) -> None:
    check(two_ranks, endings.interrupted, where)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["double", "bfloat16"])
def test_conversion_to_another_dtype(two_ranks: Ranks, dtype: torch.dtype) -> None:
    """Plain DDP goes on without reducing: who reduces what, DDP decides."""
    check(two_ranks, endings.converted, dtype)


def test_join(two_ranks: Ranks) -> None:
    check(two_ranks, endings.joined)


def test_module_that_is_not_the_ddp(two_ranks: Ranks) -> None:
    """Both would reduce, and the ranks drift apart."""
    for errors in two_ranks.run(endings.errors_of_wrong_modules):
        assert ["DistributedDataParallel" in text for text in errors] == [True, True]


def test_unwrapped_objects_are_let_go(two_ranks: Ranks) -> None:
    assert two_ranks.run(endings.nothing_kept) == [[True] * 3] * 2


def test_step_skipped_on_one_rank() -> None:
    """DDP hangs here. Who waits for what the other never sends is told so, in time."""
    ranks = run_fresh(endings.skipped_on_one_rank, args=(2.0,))
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert any(rank.stdout for rank in ranks), ranks


@by_turns(looks.EDITS)
def test_parameter_edited_after_step(two_ranks: Ranks, name: str, reader: int) -> None:
    look(two_ranks, "edits", name, reader, waits=True)
