"""Pipelines, AdamA and waves on a GPU."""

from __future__ import annotations

import gpu_plugins as scripts
import pytest
from cuda_tests import ON_CUDA, needs_nccl
from ranks import Ranks

pytestmark = ON_CUDA

KINDS = ["gpipe on one rank", "interleaved on one rank", "csv split on one rank"]


@pytest.mark.parametrize("script", ["", "clips", "accumulates", "reads"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replicated_pipeline_trains_as_reduced_at_the_end(
    two_ranks: Ranks, kind: str, script: str
) -> None:
    """Each rank has all stages: Gloo sends no activations from GPU to GPU."""
    assert two_ranks.run(scripts.pipeline, kind, script, "adamw") == [[], []]


@needs_nccl
@pytest.mark.parametrize("script", ["", "clips"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_over_nccl(one_rank: Ranks, kind: str, script: str) -> None:
    assert one_rank.run(scripts.pipeline_over_nccl, kind, script) == [[]]


@pytest.mark.parametrize("how", ["", "ddp no_sync", "closure"])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_adama_equals_one_process(two_ranks: Ranks, kind: str, how: str) -> None:
    differences = two_ranks.run(scripts.adama, kind, 3, how)
    assert max(differences) < 1e-9, differences


def test_waves_of_stages_and_bursts_are_refused(two_ranks: Ranks) -> None:
    for waves, burst in two_ranks.run(scripts.refusals):
        assert "so it has to be on the CPU" in waves
        assert "the model is on ['cuda']" in burst
