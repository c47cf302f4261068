"""What carries gradients over torch.distributed: two levels, sharded updates, first values."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import nn

from bytesched.config import Config

from ..routes.group_backend import C10dBackend
from ..routes.groups.group import Group
from ..routes.groups.opening import open_group, open_part
from ..routes.levels.choosing import open_levels
from ..routes.levels.sums import TwoLevelSums
from .joining import Joining
from .sharder import MessageSharder, RowSharder

__all__ = ["broadcast", "levels_of", "sharder_of", "splits_by_collectives"]

log = logging.getLogger("bytesched")


def levels_of(
    base: dist.ProcessGroup, ranks: Joining, data: Group, name: str, config: Config
) -> TwoLevelSums | None:
    """Sums in two levels for the session ``name``, where they are asked for or faster."""

    def opened(purpose: str, members: Sequence[int]) -> Group:
        part = open_part(base, members, name=f"{name}/{purpose}", timeout_s=config.timeout_s)
        return ranks.adopt(part)

    return open_levels(config.hierarchy, data, opened)


def splits_by_collectives(wire: str, device: torch.device) -> bool:
    """Whether rows are summed and spread by collectives: else messages go to and from owners."""
    return wire != "gloo" or device.type != "cpu"


def sharder_of(
    base: dist.ProcessGroup,
    backend: C10dBackend,
    device: torch.device,
    name: str,
    hosts: Sequence[str],
    config: Config,
) -> MessageSharder | None:
    """What shards the update of the session ``name``; None if nothing does.

    By messages over Gloo on CPUs, elsewhere by collectives.
    """
    if not config.shard:
        return None
    numbers = itertools.count()

    def opened(purpose: str, kind: str) -> Group:
        group_name = f"{name}/{purpose}{next(numbers)}"
        group = open_group(base, kind, name=group_name, timeout_s=backend.timeout_s)
        group.hosts = hosts
        return backend.add(group)

    if splits_by_collectives(backend.wire, device):
        return RowSharder(backend.size, opened, backend.remove, backend.wire)
    return MessageSharder(backend.size, opened, backend.remove)


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
