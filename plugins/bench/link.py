"""What the links of a bench can carry: measured with large all-reduces, and by their rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from bytesched.bench.specification import Specification
from bytesched.lab.ranks import Place
from bytesched.link.bound import store_bytes_per_s
from bytesched.link.levels import ring_share, shares_hosts, two_level_share

from .rank import Ranks

PROBE_BYTES: Final = 16 << 20
PROBES, EXCHANGE_PROBES = 2, 6
#: how far apart two measurements may be that agree, and after how many the search for them ends
STEADY: Final = 0.05
SETTLING_PROBES: Final = 8


def all_reduces_s(nbytes: int, tries: int) -> list[float]:
    """Seconds that each of so many all-reduces took, all ranks beginning together; collective."""
    buffer = torch.zeros(nbytes // 4)
    return _seconds(lambda: dist.all_reduce(buffer), tries)


def all_to_alls_s(nbytes: int, tries: int) -> list[float]:
    """The same of all-to-alls to which each rank hands so many bytes; collective."""
    ranks = dist.get_world_size()
    sent, received = (torch.zeros(ranks, nbytes // 4 // ranks) for _ in range(2))
    return _seconds(lambda: dist.all_to_all_single(received, sent), tries)


def _seconds(collective: Callable[[], object], tries: int) -> list[float]:
    collective()
    found = []
    for _ in range(tries):
        dist.barrier()
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
        self._nominal_bytes_per_s = place.link_bytes_per_s
        #: of large all-reduces, in bytes a second
        self.samples: list[float] = []
        self._exchanges_s: list[float] = []
        #: What is measured is a ring; where ranks share hosts, sums in two levels send less.
        self._gain = 1.0
        sharing = spec.ranks_per_host if place.link_bytes_per_s else 1
        hosts = [str(rank // sharing) for rank in range(ranks.size)]
        if shares_hosts(hosts):
            self._gain = ring_share(hosts) / two_level_share(len(set(hosts)))

    def settle(self) -> bool:
        """Probe until two measurements in a row agree, and keep those alone; false if none do.

        What a run is scaled by hangs on them, and the first ones of a new link can be far off.
        """
        self.samples = settled(lambda: self._measured(1)[0])
        return agree(*self.samples)

    def probe(self, exchange_bytes: int) -> None:
        """Time large all-reduces, and all-to-alls to which each rank hands so many bytes, if any.

        What is kept, every rank agrees on.
        """
        self.samples += self._measured(PROBES)
        if exchange_bytes:
            self._exchanges_s += self._ranks.means(all_to_alls_s(exchange_bytes, EXCHANGE_PROBES))

    def _measured(self, tries: int) -> list[float]:
        return self._ranks.means([PROBE_BYTES / s for s in all_reduces_s(PROBE_BYTES, tries)])

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
        """Bytes of gradient per second: that large all-reduces average, or that servers sum."""
        average = statistics.median(self.samples) * self._gain
        # A rank sends and receives 2(n-1)/n bytes for each byte of an all-reduce among n.
        size = self._ranks.size
        return self._through_servers(average * 2 * (size - 1) / size, otherwise=average)

    def _through_servers(self, bytes_per_s: float, otherwise: float) -> float:
        if self._servers is None:
            return otherwise
        return store_bytes_per_s(bytes_per_s, workers=self._ranks.size, servers=self._servers)

    def facts(self) -> dict[str, float]:
        """For the report."""
        found: dict[str, Any] = {"gradient_bytes_per_s": self.bytes_per_s}
        if self._exchanges_s:
            found["exchange_bytes_per_s"] = self.exchange_bytes_per_s
            found["exchange_each_ms"] = 1e3 * self.exchange_s
        if self._servers is not None:
            found |= {"servers": self._servers, "nominal_bytes_per_s": self.bytes_per_s}
            if rate := self._nominal_bytes_per_s:
                found["nominal_bytes_per_s"] = self._through_servers(rate, otherwise=rate)
        return found
