"""When a model takes a turn, and when it gives it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytesched.plugins.planned.turns import ModelTurns, open_turns
from bytesched.share.turn import HELD, Turn

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


def turn_of(turns: ModelTurns) -> Turn:
    return turns._turn


def test_a_turn_lasts_from_forward_to_the_end_of_backward(turns: ModelTurns) -> None:
    turns.forward_begins()
    turns.forward_ends()
    assert turn_of(turns) in HELD
    turns.backward_begins()
    assert turn_of(turns).totals.turns == 1
    turns.backward_ends()
    assert not HELD


def test_each_forward_pass_lets_others_go_first(turns: ModelTurns) -> None:
    for _ in range(3):
        turns.forward_begins()
        turns.forward_ends()
    turns.backward_begins()
    turns.backward_ends()
    assert turn_of(turns).totals.turns == 3


def test_a_backward_pass_takes_one_if_no_forward_pass_has(turns: ModelTurns) -> None:
    turns.backward_begins()
    assert HELD
    turns.backward_ends()
    assert not HELD


def test_a_forward_pass_without_gradients_has_its_own(turns: ModelTurns) -> None:
    with torch.no_grad():
        turns.forward_begins()
        assert HELD
        turns.forward_ends()
    assert not HELD
    assert turn_of(turns).totals.turns == 1


def test_a_forward_pass_without_gradients_is_part_of_a_longer_turn(turns: ModelTurns) -> None:
    turns.forward_begins()
    with torch.no_grad():
        turns.forward_begins()
        turns.forward_ends()
    assert HELD
    assert turn_of(turns).totals.turns == 1


def test_models_on_one_device_have_one_turn(turns: ModelTurns, tmp_path: Path) -> None:
    share = str(tmp_path / "share")
    assert turn_of(opened(share)) is turn_of(turns)
    assert turn_of(opened(share, rank=1)) is not turn_of(turns)
