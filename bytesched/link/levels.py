"""Ranks that share hosts, and how many bytes cross the network interface of a host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Levels:
    """Several hosts of several ranks each, as many on each."""

    #: the ranks of each host, in rising order
    hosts: tuple[tuple[int, ...], ...]

    @property
    def ranks_per_host(self) -> int:
        return len(self.hosts[0])

    def within(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of ``rank``."""
        return next(ranks for ranks in self.hosts if rank in ranks)

    def between(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the place of ``rank`` on their own hosts."""
        place = self.within(rank).index(rank)
        return tuple(ranks[place] for ranks in self.hosts)

    def __repr__(self) -> str:
        return f"<Levels {len(self.hosts)} hosts x {self.ranks_per_host} ranks>"


def levels_of(host_names: Sequence[str]) -> Levels | None:
    """The levels of ranks on hosts of these names; None unless there are two, evenly filled."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(host_names):
        hosts.setdefault(name, []).append(rank)
    sizes = {len(ranks) for ranks in hosts.values()}
    if len(hosts) < 2 or len(sizes) != 1 or sizes == {1}:
        return None
    return Levels(tuple(tuple(ranks) for ranks in hosts.values()))


def shares_hosts(host_names: Sequence[str]) -> bool:
    """Whether there are several hosts and one of them has several ranks."""
    counts = Counter(host_names)
    return len(counts) > 1 and max(counts.values()) > 1


def ring_share(host_names: Sequence[str]) -> float:
    """Bytes that a ring over all ranks sends from its busiest host, per byte of gradient.

    Each of n ranks sends 2(n-1)/n to the next one, which may be on its own host.
    """
    n = len(host_names)
    leaving = Counter(
        name for rank, name in enumerate(host_names) if host_names[(rank + 1) % n] != name
    )
    return 2 * (n - 1) / n * max(leaving.values(), default=0)


def two_level_share(hosts: int) -> float:
    """Bytes that each of ``hosts`` sends, per byte of gradient, where ranks add up within first."""
    return 2 * (hosts - 1) / hosts
