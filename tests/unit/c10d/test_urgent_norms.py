"""SyncBatchNorm is urgent while a model that has it is wrapped.

Its kernels need a GPU, so that what is called here stands in for them.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import nn
from torch.nn.modules import _functions

from bytesched.plugins.c10d.urgent_norms import make_norms_urgent
from bytesched.urgency import URGENCY


def test_both_passes_are_urgent_until_the_last_model_is_unwrapped() -> None:
    seen: list[tuple[str, int]] = []

    def forward(*args: Any) -> str:
        seen.append(("forward", len(URGENCY._sections)))
        return f"out {args}"

    def backward(*args: Any) -> None:
        seen.append(("backward", len(URGENCY._sections)))

    kind: Any = _functions.SyncBatchNorm
    with (
        patch.object(kind, "forward", staticmethod(forward)),
        patch.object(kind, "backward", staticmethod(backward)),
    ):
        make_norms_urgent(nn.Sequential(nn.BatchNorm1d(4)))()
        model = nn.Sequential(nn.SyncBatchNorm(4))
        undo = [make_norms_urgent(model), make_norms_urgent(model)]
        undo.pop()()
        assert kind.forward(1, 2) == "out (1, 2)"
        kind.backward()
        assert seen == [("forward", 1), ("backward", 1)]
        undo.pop()()
        assert kind.forward is forward
        assert kind.backward is backward
