"""Ranks of one group of Gloo, in this process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from together import together
from torch._C._distributed_c10d import HashStore, PrefixStore

from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.groups.store import Notes


def connected(ranks: int, timeout_s: float = 300.0) -> list[Group]:
    """So many ranks; ``timeout_s`` is that of the group, not of Gloo's operations."""
    store = HashStore()

    def one(rank: int) -> Group:
        backend: Any = dist.ProcessGroupGloo(
            PrefixStore("data", store), rank, ranks, timedelta(seconds=300)
        )
        notes = Notes(PrefixStore("notes", store), rank)
        return Group(backend, store, notes, name="s/data", timeout_s=timeout_s)

    return together(one, ranks)


def two_connected(timeout_s: float = 300.0) -> list[Group]:
    """Two of them."""
    return connected(2, timeout_s)
