"""What the waves of one rank need of a model, and where they cannot overlap or gain by it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from bytesched.errors import PluginError

from ..c10d.ddp import find_ddp


def world_size() -> int:
    """How many ranks there are; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def this_rank() -> int:
    """This rank; 0 without torch.distributed."""
    return dist.get_rank() if world_size() > 1 else 0


def trained(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those that may get a gradient. Raises PluginError for none, or if they are scattered."""
    found = [parameter for parameter in parameters if parameter.requires_grad]
    if not found:
        raise PluginError("the model has no parameter that requires a gradient")
    if len({parameter.device for parameter in found}) > 1:
        raise PluginError("the parameters are on several devices: waves need them on one")
    return found


def refuse_unsynchronised(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, is_wrapped: bool, is_off: bool
) -> None:
    """Raises PluginError where the ranks would train apart."""
    if world_size() == 1:
        return
    sends = is_wrapped or find_ddp(model) is not None or hasattr(optimizer, "_allreduce_grad_async")
    if not sends:
        why = ", and enabled is off" if is_off else ""
        raise PluginError(
            f"nothing synchronises the gradients of the {world_size()} ranks{why}: put the "
            "model into DistributedDataParallel, or call bytesched.wrap(optimizer, model) first"
        )


def why_accumulate(ddp: nn.parallel.DistributedDataParallel | None) -> str:
    """Why every wave needs an ordinary backward pass of its own; empty if it does not."""
    if ddp is not None and ddp.static_graph:
        return "DDP with static_graph counts the backward passes of all waves"
    if ddp is not None and ddp.find_unused_parameters:
        return "DDP with find_unused_parameters looks only at what the last wave uses"
    return ""


def why_alone(model: nn.Module, device: torch.device) -> str:
    """Why waves cannot run beside each other, or cannot gain by it; empty if they can."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm communicates in forward and backward, in an order of its own"
    if device.type == "cpu" and _cores() == 1:
        return "this process has one core"
    return ""


def _cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    # macOS cannot bind a process to cores.
    return os.cpu_count() or 1
