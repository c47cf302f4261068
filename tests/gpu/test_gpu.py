"""Training on a GPU: the contract over CUDA tensors, with Gloo and with NCCL.

Two ranks share the one device, over Gloo. NCCL takes one rank per device, so a world of one is
attached by hand: every chunk is scheduled and sent, to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_scripts as scripts
import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_reading as reading
import scripts_split as split
from cuda_tests import ON_CUDA, needs_nccl
from gpu_comparing import (
    Compared,
    compare_on_cuda,
    compare_on_two_hosts,
    compare_restless,
    why_not_compiled,
    why_not_here,
)
from levels_scripts import exact
from ranks import Ranks, address_of

pytestmark = ON_CUDA

Figures = dict[str, int | float | str]


def check(
    ranks: Ranks,
    script: Callable[..., None],
    *args: Any,
    compare: Callable[..., Compared] = compare_on_cuda,
    mode: str | None = "cross",
    **options: Any,
) -> list[Figures]:
    """Each rank's figures of the wrapped run, after it was found equal to the plain one."""
    outcomes = ranks.run(compare, address_of(script), args, options, timeout_s=100.0)
    for rank, (found, _) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
    figures = [stats for _, stats in outcomes]
    if mode is not None:
        assert [stats["mode"] for stats in figures] == [mode] * ranks.world_size
    return figures


def named(*cases: Callable[..., None]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("script", cases, ids=lambda script: script.__name__)


@pytest.mark.parametrize("name", optimizers.SPLITTABLE)
def test_optimizer(two_ranks: Ranks, name: str) -> None:
    if why := two_ranks.run(why_not_here, name)[0]:
        pytest.skip(why)
    check(two_ranks, optimizers.one_optimizer, name)


@named(
    optimizers.lr_by_hand,
    optimizers.parameter_groups,
    optimizers.two_optimizers,
    optimizers.closure,
    gradients.no_sync,
    gradients.accumulation_of_averages,
    gradients.clip_norm,
    gradients.clip_by_total_norm,
    gradients.clip_value,
    gradients.gradients_scaled_in_place,
    gradients.gradients_replaced,
    gradients.gradients_read,
    gradients.gradients_kept,
    gradients.gradients_written_through_data,
    gradients.gradients_seen_through_views,
    gradients.gradient_data_assigned,
    split.changed_out_of_sight,
    split.aliases_kept,
    models.static_graph,
    models.reused_layer,
    reading.weights_read,
    reading.averaged_model,
    reading.average_by_hand,
    reading.average_in_one_call,
    reading.state_read_after_step,
    reading.state_dicts,
    reading.evaluated,
    reading.unwrapped_in_the_middle,
    scripts.clip_as_torch_chooses,
    scripts.lr_on_the_device,
    scripts.average_on_a_side_stream,
)
def test_bits_are_those_of_plain_ddp(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check(two_ranks, script)


@named(
    split.norm_logged_by_rank_0,
    split.clipped_by_hand,
    split.two_optimizers,
    split.accumulated,
    split.clipped_in_a_closure,
    split.giant_and_unused,
    gradients.clip_norm,
)
def test_sharded(two_ranks: Ranks, script: Callable[..., None]) -> None:
    """Summed and spread by collectives, between ranks that share the device."""
    for figures in check(two_ranks, script, shard=True):
        assert figures["order"] == "owners"


def test_sharded_under_grad_scaler(two_ranks: Ranks) -> None:
    for figures in check(two_ranks, scripts.half_precision, False, shard=True):
        assert figures["order"] == "owners"


@pytest.mark.parametrize("turns", ["same_on_all_ranks", "differing_ranks"])
def test_unused_parameters(two_ranks: Ranks, turns: str) -> None:
    check(two_ranks, models.unused, turns)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_compression_equals_the_hook_of_ddp(two_ranks: Ranks, dtype: str) -> None:
    check(two_ranks, gradients.compressed, dtype)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_half_precision_under_grad_scaler(two_ranks: Ranks, fused: bool) -> None:
    check(two_ranks, scripts.half_precision, fused)


def test_memory_is_not_handed_out_while_it_is_read(two_ranks: Ranks) -> None:
    check(two_ranks, scripts.littered_memory)


@pytest.mark.parametrize("module_alone", [False, True], ids=["ddp", "module"])
def test_side_stream_in_forward_and_backward(two_ranks: Ranks, module_alone: bool) -> None:
    check(two_ranks, scripts.side_stream, module_alone=module_alone)


def test_barrier_is_crossed(two_ranks: Ranks) -> None:
    for figures in check(two_ranks, scripts.crossing):
        assert int(figures["barrier_crossed_steps"]) >= int(figures["steps"]) - 2
        assert float(figures["barrier_crossed_pct"]) > 0


@named(optimizers.parameter_groups, gradients.clip_norm, gradients.no_sync, reading.state_dicts)
def test_sizes_that_change_all_the_time(two_ranks: Ranks, script: Callable[..., None]) -> None:
    leader, _ = check(two_ranks, script, compare=compare_restless, mode=None)
    assert int(leader["settings"]) >= 3


def test_hosts_do_not_sum_first(four_ranks: Ranks) -> None:
    figures = check(four_ranks, exact, compare=compare_on_two_hosts, hierarchy="on")
    assert [each["levels"] for each in figures] == [1] * 4


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
    """Backward is queued before it runs: a chunk is ready when the device says so."""
    ((first, chunks),) = one_rank.run(scripts.first_sent)
    assert first
    assert all(index < chunks // 2 for index in first), (first, chunks)


@needs_nccl
def test_capture_into_a_graph_is_refused(one_rank: Ranks) -> None:
    (message,) = one_rank.run(scripts.captured_graph)
    assert "CUDA graph" in message
