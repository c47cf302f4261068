"""Modules that have become stages of a pipeline after they were wrapped alone."""

from __future__ import annotations

import gc
import sys
from typing import Final

from torch import nn

from bytesched.errors import PluginError

_STAGES: Final = "torch.distributed.pipelining.stage"


def refuse_stage(model: nn.Module) -> None:
    """Raises PluginError if ``model`` has become a stage of a pipeline after it was wrapped.

    Its schedule says when its gradients are complete, and some call no hook of a parameter.
    """
    if _is_stage(model):
        raise PluginError(
            f"this {type(model).__name__} was wrapped alone, and is a stage of a pipeline now: "
            "unwrap its optimizer, make the schedule, and call wrap(optimizer, schedule)"
        )


def _is_stage(module: nn.Module) -> bool:
    kind = getattr(sys.modules.get(_STAGES), "_PipelineStageBase", None)
    if kind is None:
        return False
    # A stage, or its ``__dict__``.
    near = gc.get_referrers(module)
    dictionaries = [thing for thing in near if type(thing) is dict and "submod" in thing]
    owners = gc.get_referrers(*dictionaries) if dictionaries else []
    return any(
        # Not isinstance: it reads the class of proxies of all kinds.
        issubclass(type(thing), kind) and vars(thing).get("submod") is module
        for thing in (*near, *owners)
    )
