"""Two ranks over NCCL that share one device."""

from __future__ import annotations

from typing import Any

import gpu_nccl_ranks as scripts
import pytest
from cuda_tests import ON_CUDA, needs_nccl
from ranks import Ranks, address_of

pytestmark = [*ON_CUDA, needs_nccl]

#: each case makes NCCL's communicators anew, and without MPS the ranks take turns
PATIENCE_S = 150.0


@pytest.mark.parametrize("elements", [1, 1000, 2**20])
def test_collectives_are_right(two_nccl_ranks: Ranks, elements: int) -> None:
    assert two_nccl_ranks.run(scripts.collectives, elements, timeout_s=PATIENCE_S) == [[], []]


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
    outcomes = two_nccl_ranks.run(
        scripts.compare_over_nccl,
        address_of(scripts.trained),
        (model,),
        options,
        timeout_s=PATIENCE_S,
    )
    for rank, (found, _) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
    assert [figures["world_size"] for _, figures in outcomes] == [2, 2]
