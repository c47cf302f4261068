"""Fixtures: pools of ranks, shared by the whole session, or by a module for Horovod's.

Horovod's ranks negotiate a thousand times a second while they have nothing to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from horovod_ranks import HorovodRanks, Kind
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


def horovod_pools(kind: Kind) -> Iterator[Callable[[int], HorovodRanks]]:
    from horovod_ranks import HorovodRanks, why_missing

    pools: dict[int, HorovodRanks] = {}

    def of_size(world_size: int) -> HorovodRanks:
        if world_size not in pools:
            pools[world_size] = HorovodRanks(kind, world_size)
        return pools[world_size]

    if reason := why_missing(kind):
        pytest.skip(reason)
    yield of_size
    with contextlib.ExitStack() as closing:
        for ranks in pools.values():
            closing.callback(ranks.close)


@pytest.fixture(scope="module")
def hvd_gloo() -> Iterator[Callable[[int], HorovodRanks]]:
    """`hvd_gloo(2)` is the pool of two Horovod ranks under `horovodrun --gloo`."""
    yield from horovod_pools("gloo")


@pytest.fixture(scope="module")
def hvd_mpi() -> Iterator[Callable[[int], HorovodRanks]]:
    """`hvd_mpi(2)` is the pool of two Horovod ranks under `mpirun`."""
    yield from horovod_pools("mpi")
