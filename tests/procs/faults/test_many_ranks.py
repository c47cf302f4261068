"""Sixteen ranks: they start, stay equal, and every one names the rank that was killed.

Their all-reduces are whole, with and without clipping, or the first half of a sharded update.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from faults_fixtures import check_told_of
from faults_runner import Runs, Scenario
from many_ranks_cases import train_until_one_dies

RANKS, VICTIM = 16, 8


@pytest.mark.parametrize(
    ("fields", "clips"),
    [
        pytest.param({}, False, id="whole"),
        pytest.param({}, True, id="clipped", marks=pytest.mark.nightly),
        pytest.param({"shard": True}, False, id="sharded", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.nightly
def test_sixteen_ranks_train_alike_and_name_the_one_that_dies(
    fields: dict[str, Any], clips: bool
) -> None:
    args = (VICTIM, fields, clips)
    scenario = Scenario("many", train_until_one_dies, args, world_size=RANKS)
    with closing(Runs([scenario])) as runs:
        ends = runs.of(scenario)
    assert len({end.told.get("weights") for end in ends}) == 1
    died = ends.pop(VICTIM)
    assert (died.code, died.hung) == (-9, False), died.stderr
    assert "weights" in died.told
    for survivor in ends:
        check_told_of(survivor, {"PeerLost"})
        assert f"rank {VICTIM}" in survivor.told["message"]
