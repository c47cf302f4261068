"""Two pipelines of two ranks: stages that are replicated train as if reduced at the end."""

from __future__ import annotations

from typing import Any

import pytest
from pipeline_cases import trains_as_plain
from ranks import Ranks

pytestmark = pytest.mark.procs

KINDS = ["gpipe", "1f1b", "interleaved", "interleaved zb", "zbv", "dualpipev", "csv", "csv split"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_trains_as_reduced_at_the_end(kind: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(trains_as_plain, kind) == [[]] * 4


@pytest.mark.parametrize("kind", ["1f1b", "csv", "csv split"])
@pytest.mark.parametrize("way", ["ddp", "named", "modules"])
def test_however_the_stages_are_given(kind: str, way: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(trains_as_plain, kind, way) == [[]] * 4


@pytest.mark.parametrize("script", ["accumulates", "clips", "reads"])
@pytest.mark.parametrize("kind", ["csv", "csv split"])
def test_whatever_the_script_does_between(kind: str, script: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(trains_as_plain, kind, "schedule", script) == [[]] * 4


@pytest.mark.parametrize(
    "fields",
    [
        {"shard": True},
        {"split": "on"},
        {"tune": True, "partition_bytes": 0, "credit_bytes": 0},
        {"policy": "fifo"},
    ],
)
@pytest.mark.parametrize("script", ["", "clips"])
def test_whatever_carries_the_gradients(
    fields: dict[str, Any], script: str, four_ranks: Ranks
) -> None:
    found = four_ranks.run(trains_as_plain, "csv split", "schedule", script, "adamw", fields)
    assert found == [[]] * 4
