"""Whether the backward pass of a forward pass that begins is one whose gradients are reduced."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import PluginError

__all__ = ["Syncing"]

_STAGES: Final = "torch.distributed.pipelining.stage"


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
            self._refuse_stage()
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

    def _refuse_stage(self) -> None:
        """Raises PluginError if the model has become a stage of a pipeline after it was wrapped.

        Its schedule says when its gradients are complete, and some call no hook of a parameter.
        """
        model = self._weak_model()
        if model is not None and _is_stage(model):
            raise PluginError(
                f"this {type(model).__name__} was wrapped alone, and is a stage of a pipeline now: "
                "unwrap its optimizer, make the schedule, and call wrap(optimizer, schedule)"
            )


def _is_stage(module: nn.Module) -> bool:
    kind = getattr(sys.modules.get(_STAGES), "_PipelineStageBase", None)
    return kind is not None and any(
        # Not isinstance: it reads the class of proxies of all kinds.
        issubclass(type(thing), kind) and vars(thing).get("submod") is module
        for thing in gc.get_objects()
    )
