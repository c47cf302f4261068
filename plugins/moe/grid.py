"""Data parallel outside, expert parallel inside: who shares experts with whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from bytesched.errors import PluginError


@dataclass(frozen=True)
class Grid:
    """The two groups of one rank."""

    #: ranks that together hold all experts, each some
    expert_parallel: dist.ProcessGroup
    #: ranks that hold the same experts as this one; None if no other does
    data_parallel: dist.ProcessGroup | None


def expert_groups(expert_ranks: int) -> Grid:
    """The groups of a grid whose rows of ``expert_ranks`` ranks hold all experts; collective.

    Of 4 ranks in rows of 2, ranks 0 and 1 exchange, and so do 2 and 3; 0 and 2 hold the same
    experts, and so do 1 and 3.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    if expert_ranks < 1 or size % expert_ranks:
        raise PluginError(f"{size} ranks cannot be cut into rows of {expert_ranks}")
    rows = [list(range(at, at + expert_ranks)) for at in range(0, size, expert_ranks)]
    columns = [list(range(at, size, expert_ranks)) for at in range(expert_ranks)]
    inside = [dist.new_group(row) for row in rows][rank // expert_ranks]
    outside = None
    if len(rows) > 1:
        outside = [dist.new_group(column) for column in columns][rank % expert_ranks]
    return Grid(inside, outside)


def own_experts(experts: int, group: dist.ProcessGroup | None = None) -> range:
    """Which of ``experts`` this rank holds, where all ranks of ``group`` hold as many."""
    if not dist.is_available() or not dist.is_initialized():
        return range(experts)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if experts % size:
        raise PluginError(f"{experts} experts cannot be spread evenly over {size} ranks")
    each = experts // size
    return range(rank * each, (rank + 1) * each)
