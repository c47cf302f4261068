"""Fixtures: pools of ranks, shared by the whole session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from horovod_launched import Kind
    from ranks import Ranks


def pool_of(world_size: int) -> Any:
    """A fixture: so many ranks."""

    @pytest.fixture(scope="session")
    def pool() -> Iterator[Ranks]:
        # Only tests that need ranks shall wait for torch to be imported.
        from ranks import Ranks

        ranks = Ranks(world_size)
        yield ranks
        ranks.close()

    return pool


one_rank, two_ranks, three_ranks, four_ranks = map(pool_of, range(1, 5))


def horovod_pools(kind: Kind) -> Any:
    """A fixture: Horovod ranks by their number, forked, but for MPI, which needs its launcher."""

    @pytest.fixture(scope="session")
    def pools() -> Iterator[Callable[[int], Ranks]]:
        from horovod_launched import LaunchedRanks, why_missing

        if reason := why_missing(kind):
            pytest.skip(reason)
        from horovod_forked import HorovodRanks

        made: dict[int, Ranks] = {}

        def of_size(world_size: int) -> Ranks:
            if world_size not in made:
                forked = kind == "gloo"
                made[world_size] = (
                    HorovodRanks(world_size) if forked else LaunchedRanks(kind, world_size)
                )
            return made[world_size]

        yield of_size
        with contextlib.ExitStack() as closing:
            for ranks in made.values():
                closing.callback(ranks.close)

    return pools


hvd_gloo, hvd_mpi = horovod_pools("gloo"), horovod_pools("mpi")
