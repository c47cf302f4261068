"""Fixtures: pools of ranks, each shared by the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
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
def four_ranks() -> Iterator[Ranks]:
    yield from pool(4)
