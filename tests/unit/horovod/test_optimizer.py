"""ByteScheduler's name for a wrap under Horovod."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bytesched.errors import PluginError


def test_scheduled_optimizer_is_for_optimizers_of_horovod() -> None:
    from bytesched.plugins.horovod import ScheduledOptimizer

    model = nn.Linear(2, 1)
    with pytest.raises(PluginError, match=r"SGD was not made by hvd\.DistributedOptimizer"):
        ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
