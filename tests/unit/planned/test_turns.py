"""When a model takes a turn, and when it gives it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytesched.plugins.planned.turns import ModelTurns, open_turns
from bytesched.share.turn import HELD

CPU = torch.device("cpu")


def opened(share: str, rank: int = 0) -> ModelTurns:
    """Of a model whose ranks have no error."""
    wire: Any = SimpleNamespace(rank=rank, size=2, timeout_s=100.0)
    return open_turns(share, CPU, wire, lambda: None)


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[ModelTurns]:
    turns = opened(str(tmp_path / "share"))
    yield turns
    turns.close()
    assert not HELD


def carried_out(turns: ModelTurns, passes: str) -> None:
    """A letter for each: f forward, F without gradients, b and e the begin and end of backward."""
    for each in passes:
        if each in "fF":
            with torch.set_grad_enabled(each == "f"):
                turns.forward_begins()
                assert turns._turn in HELD
                turns.forward_ends()
        elif each == "b":
            turns.backward_begins()
        else:
            turns.backward_ends()


@pytest.mark.parametrize(
    ("passes", "is_held", "count"),
    [
        pytest.param("fb", True, 1, id="from forward"),
        pytest.param("fbe", False, 1, id="to the end of backward"),
        pytest.param("fffbe", False, 3, id="each forward pass lets others go first"),
        pytest.param("b", True, 1, id="a backward pass takes one if no forward pass has"),
        pytest.param("be", False, 1, id="and gives it back"),
        pytest.param("F", False, 1, id="a pass without gradients has its own"),
        pytest.param("fF", True, 1, id="or is part of a longer one"),
    ],
)
def test_a_turn_lasts(turns: ModelTurns, passes: str, is_held: bool, count: int) -> None:
    carried_out(turns, passes)
    assert (turns._turn in HELD) is is_held
    assert turns._turn.totals.turns == count


def test_models_on_one_device_have_one_turn(turns: ModelTurns, tmp_path: Path) -> None:
    share = str(tmp_path / "share")
    assert opened(share)._turn is turns._turn
    assert opened(share, rank=1)._turn is not turns._turn
