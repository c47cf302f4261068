"""What no script should do between backward() and step() has the bits of plain DDP all the same."""

from __future__ import annotations

import pytest
import scripts_hostile as hostile
from comparing import check
from ranks import Ranks


@pytest.mark.parametrize("split", ["on", "auto"])
@pytest.mark.parametrize("seed", ["1", "2", "1007", "1031"])
@pytest.mark.one_in(4)
def test_drawn(two_ranks: Ranks, seed: str, split: str) -> None:
    check(two_ranks, hostile.hostile, seed, split=split)


# The last one asks for norms of a tensor of which each rank has a part.
@pytest.mark.parametrize(
    ("seed", "rtol"), [("8094", 0.0), ("8203", 0.0), ("8283", 0.0), ("8392", 1e-5)]
)
@pytest.mark.one_in(4)
def test_drawn_and_sharded(two_ranks: Ranks, seed: str, rtol: float) -> None:
    check(two_ranks, hostile.hostile, seed, True, shard=True, rtol=rtol)
