"""Every backend whose ranks can be threads of this process, for what all backends promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from connected import connected
from together import together
from torch._C._distributed_c10d import HashStore, PrefixStore

from bytesched.plugins.loopback import Loopback
from bytesched.plugins.routes.backend import Backend
from bytesched.plugins.routes.group_backend import C10dBackend
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.groups.notes import Notes
from bytesched.plugins.routes.levels.sums import TwoLevelSums

#: of every wait; none is ever waited out
TIMEOUT_S: Final = 100.0


@dataclass
class Ranks:
    """Backends of one job, by rank."""

    backends: list[Backend]
    #: ends what they share
    close: Callable[[], None]


def _loopback() -> Ranks:
    loopback = Loopback(2, timeout_s=TIMEOUT_S)
    return Ranks(list(loopback.backends), loopback.close)


def _flat() -> Ranks:
    data, control = connected(2, TIMEOUT_S), connected(2, TIMEOUT_S)
    backends: list[Backend] = [C10dBackend(*groups) for groups in zip(data, control, strict=True)]
    return Ranks(backends, lambda: None)


def _two_levels() -> Ranks:
    data, control = connected(4, TIMEOUT_S), connected(4, TIMEOUT_S)
    sums = two_level_sums(hosts=2, each=2)
    backends: list[Backend] = [
        C10dBackend(data[rank], control[rank], levels=sums[rank]) for rank in range(4)
    ]
    return Ranks(backends, lambda: None)


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


BACKENDS: Final = {"loopback": _loopback, "gloo": _flat, "gloo in two levels": _two_levels}
