"""What waves need of a model and an optimizer, and where they cannot overlap or gain by it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from bytesched.errors import PluginError

from ..c10d.ddp import find_ddp
from ..c10d.grouping import has_groups


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


def refuse_uncuttable(model: nn.Sequential, optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Raises PluginError for a chain that cannot travel in stages."""
    if not isinstance(model, nn.Sequential) or len(model) < ranks:
        raise PluginError(
            f"the model is cut into {ranks} stages: it has to be an nn.Sequential of at least "
            "so many layers"
        )
    if has_groups(model, {}):
        raise PluginError(
            "layers of the model have a data_parallel_group: waves have no groups of ranks"
        )
    elsewhere = {str(p.device) for p in model.parameters() if p.device.type != "cpu"}
    if elsewhere:
        raise PluginError(
            f"the model is on {', '.join(sorted(elsewhere))}: stages travel between hosts' "
            "memories over Gloo, so it has to be on the CPU"
        )
    held = {id(parameter) for parameter in model.parameters()}
    strangers = [
        tuple(parameter.shape)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in held
    ]
    if strangers:
        raise PluginError(
            f"the optimizer has {len(strangers)} parameters that the model has not, of shapes "
            f"{strangers}: nothing would update them; give them an optimizer of their own"
        )
    seen: dict[int, str] = {}
    for name, layer in model._modules.items():
        assert layer is not None
        for parameter in layer.parameters():
            other = seen.setdefault(id(parameter), name)
            if other != name:
                raise PluginError(
                    f"layers {other} and {name} share a parameter, and may be in different stages"
                )
