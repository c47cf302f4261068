"""Fixtures: pools of ranks, shared by the whole session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from horovod_launched import Kind
    from ranks import Ranks


def pool(world_size: int) -> Iterator[Ranks]:
    # Only tests that need ranks shall wait for torch to be imported.
    from ranks import Ranks

    ranks = Ranks(world_size)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    yield from pool(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    yield from pool(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    yield from pool(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    yield from pool(4)


def horovod_pools(kind: Kind) -> Iterator[Callable[[int], Ranks]]:
    """Forked ones, but for MPI, which needs its launcher."""
    from horovod_launched import LaunchedRanks, why_missing

    if reason := why_missing(kind):
        pytest.skip(reason)
    from horovod_forked import HorovodRanks

    pools: dict[int, Ranks] = {}

    def of_size(world_size: int) -> Ranks:
        if world_size not in pools:
            forked = kind == "gloo"
            pools[world_size] = (
                HorovodRanks(world_size) if forked else LaunchedRanks(kind, world_size)
            )
        return pools[world_size]

    yield of_size
    with contextlib.ExitStack() as closing:
        for ranks in pools.values():
            closing.callback(ranks.close)


@pytest.fixture(scope="session")
def hvd_gloo() -> Iterator[Callable[[int], Ranks]]:
    """`hvd_gloo(2)` is the pool of two Horovod ranks over Gloo."""
    yield from horovod_pools("gloo")


@pytest.fixture(scope="session")
def hvd_mpi() -> Iterator[Callable[[int], Ranks]]:
    """`hvd_mpi(2)` is the pool of two Horovod ranks under `mpirun`."""
    yield from horovod_pools("mpi")
