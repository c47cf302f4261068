"""Emulated stages: each part of a backward is waited for once, where a schedule computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

from bytesched.plugins.bench.workloads.stages import EmulatedStage

FORWARD_S, INPUT_S, WEIGHT_S = 1.0, 2.0, 4.0


class _Counted:
    """A pace that does not sleep."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def start(self) -> None:
        """Nothing."""

    def finish(self, duration_s: float) -> None:
        self.waited_s.append(duration_s)


def _forward(*, is_first: bool) -> tuple[_Counted, EmulatedStage, Any, Any]:
    pace: Any = _Counted()
    stage = EmulatedStage([[30], [4, 5]], (FORWARD_S, INPUT_S, WEIGHT_S), pace, 0)
    x = torch.ones(2, 3, requires_grad=not is_first)
    y = stage(x)
    assert pace.waited_s == [FORWARD_S]
    pace.waited_s.clear()
    return pace, stage, x, y


def test_a_split_backward_waits_for_each_half_where_it_is() -> None:
    pace, stage, x, y = _forward(is_first=False)
    _, groups = stage_backward_input([y], [torch.ones(2, 3)], [x], stage.parameters())
    assert pace.waited_s == [INPUT_S]
    assert all(parameter.grad is None for parameter in stage.parameters())
    stage_backward_weight(stage.parameters(), groups)
    assert pace.waited_s == [INPUT_S, WEIGHT_S]
    assert all(parameter.grad is not None for parameter in stage.parameters())


@pytest.mark.parametrize("is_first", [False, True])
def test_a_whole_backward_waits_for_both(is_first: bool) -> None:
    pace, stage, x, y = _forward(is_first=is_first)
    stage_backward((y,), (torch.ones(2, 3),), (x,))
    assert sum(pace.waited_s) == INPUT_S + WEIGHT_S
    assert all(parameter.grad is not None for parameter in stage.parameters())
