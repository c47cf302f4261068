"""What the links of a bench can carry: measured with large all-reduces, and by their rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bytesched.bench.specification import Specification
from bytesched.lab.ranks import Place
from bytesched.link.bound import store_bytes_per_s
from bytesched.link.levels import ring_share, shares_hosts, two_level_share

from .rank import Ranks
from .systems.data_parallel import MIB

PROBE_BYTES = 16 * MIB
PROBES = 2
EXCHANGE_PROBES = 6
#: how far apart two measurements may be that agree, and after how many the search for them ends
STEADY = 0.05
SETTLING_PROBES = 8


def all_reduces_s(nbytes: int, tries: int, group: dist.ProcessGroup | None = None) -> list[float]:
    """Seconds that each of so many all-reduces took, all ranks beginning together; collective."""
    buffer = torch.zeros(nbytes // 4)
    return _seconds(lambda: dist.all_reduce(buffer, group=group), tries, group)


def all_to_alls_s(nbytes: int, tries: int) -> list[float]:
    """The same of all-to-alls to which each rank hands so many bytes; collective."""
    ranks = dist.get_world_size()
    sent, received = (torch.zeros(ranks, nbytes // 4 // ranks) for _ in range(2))
    return _seconds(lambda: dist.all_to_all_single(received, sent), tries)


def _seconds(
    collective: Callable[[], object], tries: int, group: dist.ProcessGroup | None = None
) -> list[float]:
    collective()
    found = []
    for _ in range(tries):
        dist.barrier(group)
        began_s = time.perf_counter()
        collective()
        found.append(time.perf_counter() - began_s)
    return found


def settled(measure: Callable[[], float]) -> list[float]:
    """The first two measurements in a row that agree, or the last two of a few."""
    found = [measure(), measure()]
    while len(found) < SETTLING_PROBES and not agree(*found[-2:]):
        found.append(measure())
    return found[-2:]


def agree(before: float, after: float) -> bool:
    """Whether two measurements say about the same."""
    return abs(after - before) <= STEADY * max(before, after)


class Link:
    """The links between the ranks, and to the servers if there are any."""

    def __init__(self, ranks: Ranks, spec: Specification, place: Place) -> None:
        self._ranks = ranks
        self._servers = spec.servers
        #: of shaped links, each of which ranks of a host share
        self._nominal_bytes_per_s = place.link_bytes_per_s
        sharing = spec.ranks_per_host if place.link_bytes_per_s else 1
        self._hosts = [str(rank // sharing) for rank in range(ranks.size)]
        self._samples: list[float] = []
        self._exchanges_s: list[float] = []

    def settle(self) -> bool:
        """Probe until two measurements in a row agree, and keep those alone; false if none do.

        What a run is scaled by hangs on them, and the first ones of a new link can be far off.
        """
        self._samples = settled(lambda: self._measured(1)[0])
        return agree(*self._samples)

    def probe(self) -> None:
        """Time large all-reduces; keep what every rank agrees on."""
        self._samples += self._measured(PROBES)

    def probe_exchanges(self, nbytes: int) -> None:
        """Time all-to-alls to which each rank hands so many bytes."""
        self._exchanges_s += self._ranks.means(all_to_alls_s(nbytes, EXCHANGE_PROBES))

    def _measured(self, tries: int) -> list[float]:
        taken_s = all_reduces_s(PROBE_BYTES, tries)
        return self._ranks.means([PROBE_BYTES / each_s for each_s in taken_s])

    @property
    def exchange_bytes_per_s(self) -> float:
        """Bytes that a rank could hand to all-to-alls per second: half as many of each leave it
        as of an all-reduce."""
        return 2 * self.bytes_per_s

    @property
    def exchange_s(self) -> float:
        """How long an all-to-all of the probed size takes on idle links."""
        return statistics.median(self._exchanges_s)

    @property
    def bytes_per_s(self) -> float:
        """Bytes of gradient per second: that large all-reduces average, or that servers sum.

        What is measured is a ring; where ranks share hosts, sums in two levels send less.
        """
        average = statistics.median(self._samples)
        if shares_hosts(self._hosts):
            average *= ring_share(self._hosts) / two_level_share(len(set(self._hosts)))
        if self._servers is None:
            return average
        # A rank sends and receives 2(n-1)/n bytes for each byte of an all-reduce among n.
        size = self._ranks.size
        rate = average * 2 * (size - 1) / size
        return store_bytes_per_s(rate, workers=size, servers=self._servers)

    def facts(self) -> dict[str, Any]:
        """For the report."""
        found: dict[str, Any] = {"gradient_bytes_per_s": self.bytes_per_s}
        if self._exchanges_s:
            found["exchange_bytes_per_s"] = self.exchange_bytes_per_s
            found["exchange_each_ms"] = 1e3 * self.exchange_s
        if self._servers is not None:
            found |= {"servers": self._servers, "nominal_bytes_per_s": self.bytes_per_s}
            if rate := self._nominal_bytes_per_s:
                ranks = {"workers": self._ranks.size, "servers": self._servers}
                found["nominal_bytes_per_s"] = store_bytes_per_s(rate, **ranks)
        return found
