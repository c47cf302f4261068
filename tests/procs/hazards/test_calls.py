"""What a gradient costs in Python calls, messages and bytes: counts, the same on every machine."""

from __future__ import annotations

from pathlib import Path

import counting
import pytest
from ranks import Ranks

from bytesched.bench.compare import changes, load_result

#: of scripts/count-calls --json
STORED = load_result(Path(__file__).with_name("counts.json"))


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
    worse = [str(change) for change in compared if change.is_regression]
    assert not worse, found.by_thread()
