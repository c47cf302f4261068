"""Whether the backward pass of a forward pass that begins is one whose gradients are reduced."""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import PluginError

from ..proxies.passes import refuse_stage

__all__ = ["Syncing"]


class Syncing:
    """Called when a forward pass under grad begins.

    Args:
        model: what was wrapped.
        weak_ddp: the DDP that it is; None for a plain module, of which every pass is reduced.
    """

    def __init__(
        self, model: nn.Module, weak_ddp: weakref.ref[DistributedDataParallel] | None
    ) -> None:
        self._weak_model = weakref.ref(model)
        self._weak_ddp = weak_ddp
        self._is_first = True

    def __call__(self) -> bool:
        if self._is_first:
            self._is_first = False
            if (model := self._weak_model()) is not None:
                refuse_stage(model)
        ddp = None if self._weak_ddp is None else self._weak_ddp()
        if ddp is None:
            return True
        join = getattr(ddp, "_join_config", None)
        if join is not None and join.enable:
            raise PluginError(
                "DistributedDataParallel.join() shadows DDP's own all-reduces, but not those of "
                "bytesched: pad the shorter ranks' data, or unwrap the optimizer first"
            )
        # Scripts also set it without no_sync().
        return bool(ddp.require_backward_grad_sync)
