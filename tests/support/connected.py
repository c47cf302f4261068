"""Ranks of Gloo that are threads of this process: one group of them, or sums in two levels."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from together import together
from torch._C._distributed_c10d import HashStore, PrefixStore

from bytesched.plugins.routes.group import Group
from bytesched.plugins.routes.levels import TwoLevelSums
from bytesched.plugins.routes.store import Notes

#: of Gloo's own waits; none is ever waited out
_LIMIT = timedelta(seconds=300)


def part_of(
    store: HashStore, rank: int, name: str, members: Sequence[int], timeout_s: float = 100.0
) -> Group:
    """A group in which ``rank`` meets the other members; ``timeout_s`` is that of the group."""
    place = members.index(rank)
    backend: Any = dist.ProcessGroupGloo(PrefixStore(name, store), place, len(members), _LIMIT)
    notes = Notes(PrefixStore("notes", store), rank)
    return Group(backend, store, notes, name=name, timeout_s=timeout_s)


def connected(ranks: int, timeout_s: float = 300.0) -> list[Group]:
    store = HashStore()
    return together(lambda rank: part_of(store, rank, "s/data", range(ranks), timeout_s), ranks)


def two_connected(timeout_s: float = 300.0) -> list[Group]:
    return connected(2, timeout_s)


def two_level_sums(hosts: int, each: int) -> list[TwoLevelSums]:
    """Those of all ranks, host by host."""
    store = HashStore()

    def of(rank: int) -> TwoLevelSums:
        host, place = divmod(rank, each)
        within = range(host * each, (host + 1) * each)
        between = range(place, hosts * each, each)
        return TwoLevelSums(
            part_of(store, rank, f"gathering{host}", within),
            part_of(store, rank, f"between{place}", between),
            part_of(store, rank, f"spreading{host}", within),
        )

    return together(of, hosts * each)
