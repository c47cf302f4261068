"""Stages of which each rank has a part: FSDP and tensor parallelism."""

from __future__ import annotations

import sys
from typing import Final

from torch import nn

__all__ = ["why_parted"]

_TENSORS: Final = "torch.distributed.tensor"
_FSDP: Final = "torch.distributed.fsdp"


def why_parted(root: nn.Module) -> str:
    """Which of its parameters this rank has only a part of; empty if it has all of each.

    Looked for by the modules of torch that are imported: without them there are none.
    """
    sharded = _classes(_FSDP, "FullyShardedDataParallel", "FSDPModule")
    for name, module in root.named_modules():
        if isinstance(module, sharded):
            return f"{name} is sharded by FSDP, which reduces gradients itself"
    parts = _classes(_TENSORS, "DTensor")
    for name, parameter in root.named_parameters():
        if isinstance(parameter, parts):
            return (
                f"{name} is a DTensor, of which each rank has a part: only plain parameters of "
                "stages are averaged"
            )
    return ""


def _classes(module: str, *names: str) -> tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for name in names)
    return tuple(kind for kind in found if isinstance(kind, type))
