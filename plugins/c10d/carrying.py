"""What carries gradients over torch.distributed: two levels, and first values."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import nn

from bytesched.config import Config
from bytesched.grid import why_not

from ..routes.groups.group import Group
from ..routes.groups.opening import open_group
from ..routes.levels import TwoLevelSums, open_levels
from .joining import Joining

__all__ = ["broadcast", "levels_of"]

log = logging.getLogger("bytesched")


def levels_of(
    base: dist.ProcessGroup,
    ranks: Joining,
    data: Group,
    device: torch.device,
    name: str,
    config: Config,
) -> TwoLevelSums | None:
    """Sums in two levels for the session ``name``, where they can be, and are faster or asked for.

    Collective.

    Args:
        data: what sums travel on otherwise.
        device: where gradients are.
    """
    if device.type != "cpu" or data.backend.name() != "gloo":
        return None
    if why_not(config.cell._replace(levels="two levels")):
        return None

    def opened(purpose: str, members: Sequence[int]) -> Group:
        where = f"{name}/{purpose}"
        part = open_group(base, "gloo", name=where, timeout_s=config.timeout_s, members=members)
        return ranks.adopt(part)

    return open_levels(config.hierarchy, data, opened)


def broadcast(group: Group, module: nn.Module, *, left_out: Container[int] = ()) -> None:
    """Gives every rank the parameters and buffers of rank 0, as DDP's constructor does.

    Args:
        left_out: the ids of those that are not given.
    """
    tensors = [*module.parameters(), *module.buffers()]
    tensors = [tensor for tensor in tensors if id(tensor) not in left_out]
    group.broadcast(tensors, task="the initial broadcast")
    if group.members[group.rank] == 0:
        log.info("broadcast %d parameters and buffers of a plain module", len(tensors))
