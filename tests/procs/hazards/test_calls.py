"""What a gradient costs in Python calls, messages and bytes: counts, the same on every machine."""

from __future__ import annotations

import math
from pathlib import Path

import counting
import pytest
import way_cases
from ranks import Ranks

from bytesched.bench.compare import changes, load_result
from bytesched.link.host import added_calls

#: of scripts/count-calls --json
STORED = load_result(Path(__file__).with_name("counts.json"))
#: calls for each tensor that bytesched may take more than plain DDP
MOST = {"whole": 60.0, "crossing": 60.0, "clipped": 60.0, "clipped-whole": 60.0, "sharded": 60.0}

#: the ways that every change is tried with
EACH_CHANGE = {"whole", "clipped", "sharded"}


def test_the_stored_counts_are_of_what_is_counted() -> None:
    assert STORED["setting"] == counting.setting(counting.LAYERS)
    assert set(STORED["systems"]) == set(counting.WAYS)


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=() if way in EACH_CHANGE else pytest.mark.nightly)
        for way, its in counting.WAYS.items()
        if its.fields is not None
    ],
)
@pytest.mark.one_in(3)
def test_a_gradient_costs_no_more_than_is_stored(two_ranks: Ranks, way: str) -> None:
    found = counting.counted(two_ranks, way, counting.LAYERS)
    now = {"systems": counting.figures({way: found})}
    compared = changes(STORED, now)
    assert compared
    plain = STORED["systems"][counting.WAYS[way].plain]["counts"]["calls_per_tensor"]
    assert found.total - plain <= MOST.get(way, math.inf), found.by_thread()
    worse = [str(change) for change in compared if change.is_regression]
    assert not worse, found.by_thread()


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize(
    "layers", [36, *(pytest.param(other, marks=pytest.mark.nightly) for other in (18, 75))]
)
@pytest.mark.nightly
def test_what_ddp_does_costs_few_calls_more(two_ranks: Ranks, layers: int) -> None:
    """So many for each tensor and each chunk: of 72 to 300 tensors, in up to 100 chunks."""
    plain = counting.counted(two_ranks, "ddp", layers)
    found = counting.counted(two_ranks, "crossing", layers)
    tensors = counting.TENSORS_PER_LAYER * layers
    more = (found.total - plain.total) * tensors
    assert more <= added_calls(tensors, round(found.messages)), (more, tensors, found.messages)


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize(("in_ddp", "functions", "files"), [(True, 25, 11), (False, 30, 13)])
@pytest.mark.one_in(2)
def test_a_gradient_meets_few_functions(
    two_ranks: Ranks, in_ddp: bool, functions: int, files: int
) -> None:
    """From the hook that sees it to the update that takes it: docs name the files in this order."""
    found = two_ranks.run(way_cases.functions_of_a_chunk, in_ddp)[0]
    for file, names in found.items():
        print(file, *names)
    assert sum(map(len, found.values())) <= functions, found
    assert len(found) <= files, found
