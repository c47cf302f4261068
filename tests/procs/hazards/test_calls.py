"""What a gradient costs in Python calls: a count, the same on every machine."""

from __future__ import annotations

import counting
import pytest
from ranks import Ranks

#: of four tensors each
LAYERS = 36
#: more than plain DDP, for each tensor and iteration
MOST = {"whole": 60, "crossing": 60, "clipped": 95, "sharded": 100}


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize("way", sorted(MOST))
def test_a_gradient_costs_few_calls(two_ranks: Ranks, way: str) -> None:
    plain = counting.counted(two_ranks, counting.WAYS[way].plain, LAYERS)
    ours = counting.counted(two_ranks, way, LAYERS)
    assert ours.total - plain.total <= MOST[way], ours.by_thread()
