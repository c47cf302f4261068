"""With urgent sections, training is still that of plain DDP, and no rank waits for a held one."""

from __future__ import annotations

from typing import Any

import pytest
import scripts_urgent as urgent
from comparing import Script, cases, check, of
from ranks import Ranks

#: many chunks, most of them still to be sent when the next forward pass begins
MANY: dict[str, Any] = {"partition_bytes": 2048, "credit_bytes": 2048, "timeout_s": 30.0}
WAYS: dict[str, dict[str, Any]] = {
    "whole": MANY | {"split": "off"},
    "split": MANY | {"split": "on"},
    "sharded": MANY | {"shard": True},
}
ways = pytest.mark.parametrize("way", WAYS)


@ways
@cases(
    *of(urgent, "mixed_by_collectives gates_inside_sections mixed_and_clipped"),
    *of(urgent, "mean_loss_before_step raises_inside"),
)
@pytest.mark.one_in(5)
def test_two_ranks(two_ranks: Ranks, script: Script, args: list[Any], way: str) -> None:
    for stats in check(two_ranks, script, **WAYS[way]):
        assert float(stats["urgent_sections"]) > 0
        assert float(stats["held_s"]) <= float(stats["urgent_s"])


@pytest.mark.parametrize("way", ["whole", "sharded"])
@cases(*of(urgent, "mixed_by_collectives mixed_and_clipped"))
@pytest.mark.one_in(2)
def test_three_ranks(three_ranks: Ranks, script: Script, args: list[Any], way: str) -> None:
    check(three_ranks, script, rtol=1e-5, **WAYS[way])


@ways
@cases(*of(urgent, "read_by_rank_0_alone entered_by_rank_0_alone"))
@pytest.mark.one_in(3)
def test_ranks_that_differ(two_ranks: Ranks, script: Script, args: list[Any], way: str) -> None:
    check(two_ranks, script, **WAYS[way])
