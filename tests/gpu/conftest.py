"""Fixtures of tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from bytesched.bench.gpu_ranks import mps

if TYPE_CHECKING:
    from gpu_nccl_ranks import NcclRanks


@pytest.fixture(scope="session")
def two_nccl_ranks() -> Iterator[NcclRanks]:
    """Two ranks over NCCL on one device, under MPS if that is installed."""
    from gpu_nccl_ranks import NcclRanks

    with mps() as (variables, _):
        ranks = NcclRanks(2, variables)
        try:
            yield ranks
        finally:
            ranks.close()
