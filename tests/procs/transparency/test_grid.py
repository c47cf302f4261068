"""Every cell of the grid trains as plain DDP does, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import scripts_optimizers as optimizers
import scripts_split as split
from comparing import check
from levels_scripts import HostsJob
from ranks import Ranks

import bytesched
from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.grid import Cell, cells, why_not
from bytesched.tunable import Setting

#: scripts, and what they are given
SCRIPTS: dict[str, tuple[Any, ...]] = {
    "two optimizers": (split.two_optimizers,),
    "closure": (split.clipped_in_a_closure,),
    "GradScaler": (optimizers.grad_scaler, "adamw"),
    "accumulation": (split.accumulated,),
    "unused parameters": (split.giant_and_unused,),
}
#: by what carries gradients
ORDERS = {"split": "halves", "sharded": "owners"}
WORKING = [cell for cell in cells() if not why_not(cell)]
IMPOSSIBLE = [cell for cell in cells() if why_not(cell)]
#: what a tuner tries, with steps
TURNS = [
    (Setting(256, 512), 2),
    (Setting(96, 300), 2),
    (Setting(1000, 2000), 2),
    (Setting(512, 512), 1),
]


def settings_of(cell: Cell) -> dict[str, Any]:
    return {
        "shard": cell.carried == "sharded",
        "split": {"whole": "off", "split": "on", "sharded": "auto"}[cell.carried],
        "hierarchy": "on" if cell.levels == "two levels" else "off",
        "turns": TURNS if cell.sizes == "tuned" else (),
    }


def check_cell(ranks: Ranks, cell: Cell, name: str, hosts: list[int], rtol: float) -> None:
    script, *args = SCRIPTS[name]
    settings = settings_of(cell)
    outcomes = check(ranks, script, *args, rtol=rtol, kind=HostsJob, hosts=hosts, **settings)
    for stats in outcomes:
        assert stats["levels"] == (2 if cell.levels == "two levels" else 1)
        assert stats["order"] == ORDERS.get(cell.carried, "planned")
    assert len({stats["digest"] for stats in outcomes}) == 1


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("cell", WORKING, ids="-".join)
@pytest.mark.one_in(5)
def test_cell_trains_as_plain_ddp(
    two_ranks: Ranks, four_ranks: Ranks, cell: Cell, name: str
) -> None:
    """To the last bit between two ranks; where sums or norms are rounded, closely, and alike."""
    is_flat = cell.levels == "flat"
    # It clips by the norm of a tensor of which each rank has a part.
    is_rounded = cell.carried == "sharded" and name == "unused parameters"
    rtol = 0.0 if is_flat and not is_rounded else 1e-5
    ranks, hosts = (two_ranks, [1, 1]) if is_flat else (four_ranks, [2, 2])
    check_cell(ranks, cell, name, hosts, rtol)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.one_in(5)
def test_three_owners(three_ranks: Ranks, name: str) -> None:
    check_cell(three_ranks, Cell("sharded"), name, [1, 1, 1], 1e-5)


@pytest.mark.parametrize("cell", IMPOSSIBLE, ids="-".join)
def test_impossible_cell_is_refused_by_name(cell: Cell) -> None:
    settings = settings_of(cell) | {"tune": cell.sizes == "tuned"}
    del settings["turns"]
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    assert why_not(cell) in str(caught.value)
    assert isinstance(caught.value, bytesched.BytesschedError)
