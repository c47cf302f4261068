"""What carries the gradients of ranks of torch: sums in two levels, split sums, first values."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import nn

from bytesched.config import Config
from bytesched.link.levels import shares_hosts

from ..routes.group_backend import C10dBackend
from ..routes.groups.group import Group
from ..routes.groups.opening import open_group, open_part
from ..routes.levels.choosing import open_levels
from ..routes.levels.sums import TwoLevelSums
from .joining import Joining
from .row_splitter import RowSplitter
from .splitter import ExchangeSplitter

__all__ = ["broadcast", "levels_of", "splits_by_collectives", "splitter_of"]

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


def splitter_of(
    base: dist.ProcessGroup,
    backend: C10dBackend,
    device: torch.device,
    name: str,
    hosts: Sequence[str],
    config: Config,
) -> ExchangeSplitter | None:
    """What splits the all-reduces of the session ``name``; None if nothing does.

    By messages over Gloo on CPUs; and if a script only asks for norms, where each host has one
    rank, or there is one host: from g ranks on each of N hosts, an exchange sends g times 2(N-1)/N
    of the bytes, more than the all-reduce it takes the place of. Elsewhere by collectives; never
    where hosts sum first.
    """
    asks_alone = config.split == "auto" and not config.shard
    if backend.levels > 1 and asks_alone:
        return None
    numbers = itertools.count()

    def opened(purpose: str, kind: str) -> Group:
        group_name = f"{name}/{purpose}{next(numbers)}"
        group = open_group(base, kind, name=group_name, timeout_s=backend.timeout_s)
        group.hosts = hosts
        return backend.add(group)

    if splits_by_collectives(backend.wire, device):
        return RowSplitter(backend.size, opened, backend.remove, backend.wire)
    if asks_alone and shares_hosts(hosts):
        return None
    return ExchangeSplitter(backend.size, opened, backend.remove)


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
