"""Training on a GPU: the contract over CUDA tensors, with Gloo and with NCCL.

Two ranks share the one device, over Gloo. NCCL takes one rank per device, so a world of one is
attached by hand: every chunk is scheduled and sent, to nobody.
"""

from __future__ import annotations

import functools
from typing import Any

import comparing
import gpu_scripts as scripts
import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_reading as reading
import scripts_rounds as rounds
import scripts_split as split
from comparing import Script, cases, of
from cuda_tests import ON_CUDA, needs_nccl
from gpu_comparing import (
    CudaJob,
    HostsCudaJob,
    RestlessCudaJob,
    why_not_compiled,
    why_not_here,
)
from levels_scripts import exact
from ranks import Ranks

pytestmark = ON_CUDA

check = functools.partial(comparing.check, kind=CudaJob)


@pytest.mark.parametrize("name", optimizers.SPLITTABLE)
def test_optimizer(two_ranks: Ranks, name: str) -> None:
    if why := two_ranks.run(why_not_here, name)[0]:
        pytest.skip(why)
    check(two_ranks, optimizers.one_optimizer, name)


@cases(
    *of(optimizers, "lr_by_hand parameter_groups two_optimizers closure"),
    (optimizers.step_every_other_backward,),
    *of(
        gradients,
        """
        no_sync clip_norm clip_some gradients_written gradients_replaced
        gradients_read gradients_kept gradients_seen_through_views gradient_data_assigned
        """,
    ),
    *of(split, "changed_out_of_sight aliases_kept"),
    (models.one_model, "checkpoint_reentrant", {"static_graph": True}),
    (models.reused_layer,),
    *of(reading, "weights_read averaged_model state_read_after_step"),
    *of(reading, "state_dicts evaluated"),
    (rounds.unwrapped_and_wrapped,),
    *of(scripts, "clip_as_torch_chooses lr_on_the_device average_on_a_side_stream"),
    # Whether memory is handed out while it is read.
    (scripts.littered_memory,),
)
def test_bits_are_those_of_plain_ddp(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    check(two_ranks, script, *args)


@cases(
    (split.norm_logged, "rank 0"),
    *of(split, "clipped_by_hand two_optimizers accumulated clipped_in_a_closure giant_and_unused"),
    (gradients.clip_norm,),
    (optimizers.grad_scaler, "adamw_foreach", "cuda"),
)
def test_sharded(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    """Summed and spread by collectives, between ranks that share the device."""
    for figures in check(two_ranks, script, *args, shard=True):
        assert figures["order"] == "owners"


@pytest.mark.parametrize("turns", ["same_on_all_ranks", "differing_ranks"])
def test_unused_parameters(two_ranks: Ranks, turns: str) -> None:
    check(two_ranks, models.unused, turns)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_compression_equals_the_hook_of_ddp(two_ranks: Ranks, dtype: str) -> None:
    check(two_ranks, gradients.compressed, dtype)


@pytest.mark.parametrize("name", ["adamw_foreach", "adamw_fused"])
def test_half_precision_under_grad_scaler(two_ranks: Ranks, name: str) -> None:
    check(two_ranks, optimizers.grad_scaler, name, "cuda")


@pytest.mark.parametrize("module_alone", [False, True], ids=["ddp", "module"])
def test_side_stream_in_forward_and_backward(two_ranks: Ranks, module_alone: bool) -> None:
    check(two_ranks, scripts.side_stream, module_alone=module_alone)


def test_barrier_is_crossed(two_ranks: Ranks) -> None:
    for figures in check(two_ranks, scripts.crossing):
        assert int(figures["barrier_crossed_steps"]) >= int(figures["steps"]) - 2
        assert float(figures["barrier_crossed_pct"]) > 0


@cases((optimizers.parameter_groups,), *of(gradients, "clip_norm no_sync"), (reading.state_dicts,))
def test_sizes_that_change_all_the_time(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    leader, _ = check(two_ranks, script, kind=RestlessCudaJob, mode="")
    assert int(leader["settings"]) >= 3


def test_hosts_do_not_sum_first(four_ranks: Ranks) -> None:
    figures = check(four_ranks, exact, kind=HostsCudaJob, hosts=[2, 2], hierarchy="on")
    assert [stats["levels"] for stats in figures] == [1] * 4


@pytest.mark.parametrize("what", ["inner", "whole"])
def test_compiled(two_ranks: Ranks, what: str) -> None:
    if why := two_ranks.run(why_not_compiled)[0]:
        pytest.skip(why)
    check(two_ranks, models.compiled, what, "inductor")


@needs_nccl
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"fused": True},
        {"norms": True},
        {"fused": True, "norms": True},
        {"alone": True},
        {"alone": True, "norms": True},
        {"clips": True},
        {"clips": True, "alone": True},
    ],
    ids=lambda how: "-".join(how) or "plain",
)
def test_nccl(one_rank: Ranks, how: dict[str, bool]) -> None:
    ((found, figures),) = one_rank.run(scripts.over_nccl, how)
    assert not found, "\n".join(found)
    # Clipped by reduce-scatter and all-gather: of one rank, they are over when its norm is there.
    assert how.get("clips") or int(figures["barrier_crossed_steps"]) > 0


@needs_nccl
def test_step_and_forward_do_not_synchronize(one_rank: Ranks) -> None:
    (found,) = one_rank.run(scripts.synchronizing_calls)
    assert not found, "\n".join(found)


@needs_nccl
def test_what_is_computed_first_is_sent_first(one_rank: Ranks) -> None:
    """Backward is queued before it runs: a plan is made of when the device was at each chunk."""
    ((first, chunks),) = one_rank.run(scripts.first_sent)
    assert first
    assert all(index < chunks // 2 for index in first), (first, chunks)


@needs_nccl
def test_capture_into_a_graph_is_refused(one_rank: Ranks) -> None:
    (message,) = one_rank.run(scripts.captured_graph)
    assert "CUDA graph" in message
