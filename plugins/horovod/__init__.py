"""Horovod: its optimizer as a shell, its all-reduce as the wire."""

from __future__ import annotations

from typing import Any

from torch import nn, optim

from bytesched.errors import PluginError

from .. import wrap

__all__ = ["ScheduledOptimizer"]


def ScheduledOptimizer(
    optimizer: optim.Optimizer, model: nn.Module, **fields: Any
) -> optim.Optimizer:
    """ByteScheduler's name for `bytesched.wrap` of an optimizer of Horovod's, and no other."""
    if not hasattr(optimizer, "_allreduce_grad_async"):
        raise PluginError(
            f"{type(optimizer).__name__} was not made by hvd.DistributedOptimizer: "
            "use bytesched.wrap, or make it so first"
        )
    wrap(optimizer, model, **fields)
    return optimizer
