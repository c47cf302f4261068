"""What bytesched costs on a GPU: figures, and no goal but that they are there."""

from __future__ import annotations

from collections.abc import Callable

import gpu_figures as scripts
import pytest
from cuda_tests import ON_CUDA, needs_nccl
from gpu_scripts import iteration_ms
from ranks import Ranks

pytestmark = ON_CUDA

Record = Callable[[str, object], None]


def show(record_property: Record, figures: dict[str, float]) -> None:
    for name, value in figures.items():
        record_property(name, value)
    print(", ".join(f"{name} {value:.4g}" for name, value in figures.items()))


def test_iteration_time(two_ranks: Ranks, record_property: Record) -> None:
    """Two ranks on one device compute at half speed each."""
    figures = {
        name: max(two_ranks.run(iteration_ms, wrapped, timeout_s=100.0))
        for name, wrapped in (("ddp_ms", False), ("bytesched_ms", True))
    }
    show(record_property, figures)


@needs_nccl
@pytest.mark.parametrize("size", scripts.SIZES)
def test_overhead_over_nccl(one_rank: Ranks, size: str, record_property: Record) -> None:
    (figures,) = one_rank.run(scripts.overhead, size)
    show(record_property, figures)


def test_peak_memory(two_ranks: Ranks, record_property: Record) -> None:
    figures = {f"{way}_mib": max(two_ranks.run(scripts.peak_mib, way)) for way in scripts.WAYS}
    show(record_property, figures)
