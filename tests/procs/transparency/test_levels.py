"""Sums within hosts and then between them: the weights of plain DDP, and one set on all ranks."""

from __future__ import annotations

import functools
from typing import Any

import comparing
import levels_scripts as scripts
import pytest
from raised import check_survivors
from ranks import Ranks, run_fresh
from scripts_optimizers import one_optimizer

ADAMW = one_optimizer, "adamw"
check = functools.partial(comparing.check, kind=scripts.HostsJob, hosts=[2, 2])


@pytest.mark.parametrize(
    ("options", "rtol"),
    [({}, 1e-5), ({"module_alone": True}, 1e-5), ({"compression": "bf16"}, 2e-2)],
    ids=["DDP", "a plain module", "compressed"],
)
def test_equal_but_for_the_order_of_sums(four_ranks: Ranks, options: Any, rtol: float) -> None:
    for figures in check(four_ranks, *ADAMW, rtol=rtol, hierarchy="on", **options):
        assert figures["levels"] == 2


def test_equal_bits_where_nothing_is_rounded(four_ranks: Ranks) -> None:
    assert {stats["levels"] for stats in check(four_ranks, scripts.exact, hierarchy="on")} == {2}


@pytest.mark.parametrize(("hierarchy", "levels"), [("off", {1}), ("auto", {1, 2})])
def test_all_ranks_decide_alike(four_ranks: Ranks, hierarchy: str, levels: set[int]) -> None:
    figures = check(four_ranks, *ADAMW, rtol=1e-5, hierarchy=hierarchy)
    found = {int(stats["levels"]) for stats in figures}
    assert len(found) == 1
    assert found <= levels


def test_uneven_hosts_are_refused_by_name(three_ranks: Ranks) -> None:
    for text in three_ranks.run(scripts.refused, [2, 1]):
        assert "{'host0': 2, 'host1': 1}" in text


def test_a_death_is_told_on_all_hosts() -> None:
    ranks = run_fresh(scripts.rank_3_dies, world_size=4)
    check_survivors(ranks)
    assert "rank 3 on host1 is gone" in ranks[2].stdout
