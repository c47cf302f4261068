"""Two ranks over NCCL that share one device."""

from __future__ import annotations

from typing import Any

import gpu_nccl_ranks as scripts
import pytest
from comparing import check
from cuda_tests import ON_CUDA, needs_nccl
from ranks import Ranks

pytestmark = [*ON_CUDA, needs_nccl]


@pytest.mark.parametrize("elements", [1, 1000, 2**20])
def test_collectives_are_right(two_nccl_ranks: Ranks, elements: int) -> None:
    assert two_nccl_ranks.run(scripts.collectives, elements) == [[], []]


@pytest.mark.parametrize(
    "options",
    [
        {"partition_bytes": "16KiB", "credit_bytes": "64KiB"},
        {"partition_bytes": "auto", "credit_bytes": "auto"},
    ],
    ids=["small", "chosen"],
)
@pytest.mark.parametrize("model", ["conv", "gpt"])
def test_bits_are_those_of_plain_ddp(
    two_nccl_ranks: Ranks, model: str, options: dict[str, Any]
) -> None:
    job = scripts.DeterministicJob
    figures = check(two_nccl_ranks, scripts.trained, model, kind=job, mode="", **options)
    assert [stats["world_size"] for stats in figures] == [2, 2]
