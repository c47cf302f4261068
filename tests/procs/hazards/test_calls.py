"""What a gradient costs in Python calls, messages and bytes: counts, the same on every machine."""

from __future__ import annotations

import math
from pathlib import Path

import counting
import pytest
from ranks import Ranks

from bytesched.bench.compare import changes, load_result

#: of scripts/count-calls --json
STORED = load_result(Path(__file__).with_name("counts.json"))
#: calls for each tensor that bytesched may take more than plain DDP
MOST = {"whole": 60.0, "crossing": 60.0, "clipped": 60.0, "clipped-whole": 60.0, "sharded": 60.0}


def test_the_stored_counts_are_of_what_is_counted() -> None:
    assert STORED["setting"] == counting.setting(counting.LAYERS)
    assert set(STORED["systems"]) == set(counting.WAYS)


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize(
    "way", [way for way, its in counting.WAYS.items() if its.fields is not None]
)
def test_a_gradient_costs_no_more_than_is_stored(two_ranks: Ranks, way: str) -> None:
    found = counting.counted(two_ranks, way, counting.LAYERS)
    now = {"systems": counting.figures({way: found})}
    compared = changes(STORED, now)
    assert compared
    plain = STORED["systems"][counting.WAYS[way].plain]["counts"]["calls_per_tensor"]
    assert found.total - plain <= MOST.get(way, math.inf), found.by_thread()
    worse = [str(change) for change in compared if change.is_regression]
    assert not worse, found.by_thread()
