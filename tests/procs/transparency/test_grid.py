"""Every cell of the grid trains as plain DDP does, or is refused by name."""

from __future__ import annotations

from typing import Any

import levels_scripts
import pytest
import scripts_optimizers as optimizers
import scripts_split as split
from ranks import Ranks, address_of

import bytesched
from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.grid import Cell, cells, why_not

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


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("cell", WORKING, ids="-".join)
@pytest.mark.one_in(5)
def test_cell_trains_as_plain_ddp(request: pytest.FixtureRequest, cell: Cell, name: str) -> None:
    """To the last bit between two ranks; where sums or norms are rounded, closely, and alike."""
    script, *args = SCRIPTS[name]
    is_flat = cell.levels == "flat"
    # It clips by the norm of a tensor of which each rank has a part.
    is_rounded = cell.carried == "sharded" and name == "unused parameters"
    ranks: Ranks = request.getfixturevalue("two_ranks" if is_flat else "four_ranks")
    hosts = [1, 1] if is_flat else [2, 2]
    outcomes = ranks.run(
        levels_scripts.in_cell,
        tuple(cell),
        hosts,
        address_of(script),
        tuple(args),
        0.0 if is_flat and not is_rounded else 1e-5,
    )
    for rank, (found, stats) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
        assert stats["mode"] == "cross"
        assert stats["levels"] == (1 if is_flat else 2)
        assert stats["order"] == ORDERS.get(cell.carried, "planned")
    assert len({stats["digest"] for _, stats in outcomes}) == 1


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.one_in(5)
def test_three_owners(three_ranks: Ranks, name: str) -> None:
    script, *args = SCRIPTS[name]
    outcomes = three_ranks.run(
        levels_scripts.in_cell,
        tuple(Cell("sharded")),
        [1, 1, 1],
        address_of(script),
        tuple(args),
        1e-5,
    )
    for rank, (found, stats) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
        assert stats["order"] == "owners"
    assert len({stats["digest"] for _, stats in outcomes}) == 1


@pytest.mark.parametrize("cell", IMPOSSIBLE, ids="-".join)
def test_impossible_cell_is_refused_by_name(cell: Cell) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(
            shard=cell.carried == "sharded",
            split="on" if cell.carried == "split" else "auto",
            hierarchy="on" if cell.levels == "two levels" else "auto",
            tune=cell.sizes == "tuned",
        )
    assert why_not(cell) in str(caught.value)
    assert isinstance(caught.value, bytesched.BytesschedError)
