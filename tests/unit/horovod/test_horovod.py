"""Tensors on their way through Horovod: who holds them; and ByteScheduler's name for a wrap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bytesched.errors import PluginError


def owners(tensor: Any) -> int:
    """Its Python object and whoever holds it without one."""
    count: int = tensor._use_count()
    return count


def test_letting_go_of_what_is_held_is_no_affair_of_python() -> None:
    from bytesched.plugins.horovod.operations import Held

    held = Held()
    arena = torch.zeros(8)
    for tensor in (arena[2:5], torch.zeros(1, 1, 2, dtype=torch.int64)):
        alone = owners(tensor)
        for _ in range(3):
            held.hold(tensor)
        assert owners(tensor) == alone + 1
        tensor.add_(1)


def test_what_is_not_held_again_is_let_go() -> None:
    from bytesched.plugins.horovod.operations import Held

    held = Held()
    kept, left = torch.zeros(2), torch.zeros(2)
    alone = owners(kept)
    held.hold(kept)
    held.hold(left)
    for _ in range(2):
        held.let_go()
        held.hold(kept)
    assert (owners(kept), owners(left)) == (alone + 1, alone)


def test_scheduled_optimizer_is_for_optimizers_of_horovod() -> None:
    from bytesched.plugins.horovod import ScheduledOptimizer

    model = nn.Linear(2, 1)
    with pytest.raises(PluginError, match=r"SGD was not made by hvd\.DistributedOptimizer"):
        ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
