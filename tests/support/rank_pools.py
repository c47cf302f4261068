"""Fixtures: pools of ranks, shared by the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
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


@pytest.fixture(scope="session")
def hvd_gloo() -> Iterator[Callable[[int], Ranks]]:
    """Horovod ranks by their number."""
    from horovod_launched import why_missing

    if reason := why_missing("gloo"):
        pytest.skip(reason)
    from horovod_forked import HorovodRanks

    made: dict[int, Ranks] = {}

    def of_size(world_size: int) -> Ranks:
        if world_size not in made:
            made[world_size] = HorovodRanks(world_size)
        return made[world_size]

    yield of_size
    for ranks in made.values():
        ranks.close()
