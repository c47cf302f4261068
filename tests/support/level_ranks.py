"""Sums in two levels whose ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from together import together
from torch._C._distributed_c10d import HashStore, PrefixStore

from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.groups.store import Notes
from bytesched.plugins.routes.levels import TwoLevelSums

#: of every wait; none is ever waited out
TIMEOUT_S: Final = 100.0


def part_of(store: HashStore, rank: int, name: str, members: Sequence[int]) -> Group:
    """A group of Gloo in which ``rank`` meets the other members."""
    limit = timedelta(seconds=TIMEOUT_S)
    place = members.index(rank)
    backend: Any = dist.ProcessGroupGloo(PrefixStore(name, store), place, len(members), limit)
    notes = Notes(PrefixStore("notes", store), rank)
    return Group(backend, store, notes, name=name, timeout_s=TIMEOUT_S)


def two_level_sums(hosts: int, each: int) -> list[TwoLevelSums]:
    """Those of all ranks, host by host, over Gloo."""
    store = HashStore()

    def of(rank: int) -> TwoLevelSums:
        host, place = divmod(rank, each)
        within = [host * each + other for other in range(each)]
        between = [other * each + place for other in range(hosts)]
        return TwoLevelSums(
            part_of(store, rank, f"gathering{host}", within),
            part_of(store, rank, f"between{place}", between),
            part_of(store, rank, f"spreading{host}", within),
        )

    return together(of, hosts * each)
