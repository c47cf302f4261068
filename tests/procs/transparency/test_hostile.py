"""What no script should do between backward() and step() has the bits of plain DDP all the same."""

from __future__ import annotations

import pytest
import scripts_hostile as hostile
from comparing import check
from ranks import Ranks


@pytest.mark.parametrize("split", ["on", "auto"])
@pytest.mark.parametrize("seed", ["1", "2", "1007", "1031"])
def test_drawn(two_ranks: Ranks, seed: str, split: str) -> None:
    check(two_ranks, hostile.hostile, seed, split=split)


@pytest.mark.parametrize("seed", ["8094", "8203", "8283", "8392"])
def test_drawn_and_sharded(two_ranks: Ranks, seed: str) -> None:
    check(two_ranks, hostile.hostile, seed, True, shard=True)
