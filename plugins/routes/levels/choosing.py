"""Whether sums go in two levels: by setting, and by what is faster here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final

import torch

from bytesched.errors import PluginError
from bytesched.link.levels import Levels, levels_of, ring_share, shares_hosts, two_level_share

from ..groups.group import Group
from .sums import TwoLevelSums

__all__ = ["open_levels"]

log = logging.getLogger("bytesched")

#: of a trial: bytes of each sum, how many follow one another, how many are under way at a time
_NBYTES: Final = 1 << 20
_COUNT: Final = 8
#: one on its way within a host in either direction, and two between hosts
_WINDOW: Final = 4
#: trials of each way; the best one counts
_TRIES: Final = 2


def open_levels(
    hierarchy: str,
    data: Group,
    open_part: Callable[[str, Sequence[int]], Group],
) -> TwoLevelSums | None:
    """The sums in two levels that the ranks of ``data`` use; None if flat ones are as good.

    Collective. With "auto" both ways are tried on the link, and the faster one is taken.

    Args:
        hierarchy: the setting, "auto", "on" or "off".
        data: a group of Gloo that knows its hosts.
        open_part: opens a group for a purpose among the ranks that are named, of which this one
            is one; collective among them.

    Raises `PluginError` for "on" where hosts have different numbers of ranks.
    """
    levels = None if hierarchy == "off" else levels_of(data.hosts)
    if levels is None:
        if hierarchy == "on":
            _explain(data.hosts)
        return None
    groups = _open(levels, data.rank, open_part)
    sums = TwoLevelSums(*groups)
    if hierarchy == "auto":
        flat_s, levels_s = _seconds(data, sums)
        log.info(
            "%d hosts of %d ranks: %.1f ms for a sum of %d KiB over all ranks, %.1f ms in two "
            "levels (by the bytes that leave a host: %.2f to 1)",
            len(levels.hosts),
            levels.ranks_per_host,
            1e3 * flat_s,
            _NBYTES >> 10,
            1e3 * levels_s,
            ring_share(data.hosts) / two_level_share(len(levels.hosts)),
        )
        if flat_s <= levels_s:
            sums.close()
            return None
    return sums


def _explain(hosts: Sequence[str]) -> None:
    """For a hierarchy that was asked for, and that these hosts do not have."""
    if shares_hosts(hosts):
        counts = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
        raise PluginError(
            f"hierarchy is 'on', but hosts have different numbers of ranks: {counts}; start as "
            "many on each, or leave it at 'auto'"
        )
    log.info("hierarchy is on, but there is one host, or each has one rank: sums stay flat")


def _open(
    levels: Levels, rank: int, open_part: Callable[[str, Sequence[int]], Group]
) -> tuple[Group, Group, Group]:
    within, between = levels.within(rank), levels.between(rank)
    host, place = levels.hosts.index(within), within.index(rank)
    return (
        open_part(f"gathering{host}", within),
        open_part(f"between{place}", between),
        open_part(f"spreading{host}", within),
    )


def _seconds(data: Group, sums: TwoLevelSums) -> tuple[float, float]:
    """Of a sum over all ranks, and of one in two levels; the same numbers on all ranks."""

    ways = data.all_reduce, sums.start
    best = [min(_timed(data, start) for _ in range(_TRIES)) for start in ways]
    # The slowest rank's, by a sum in which others have nothing: there is no time below 0.
    everyone = torch.zeros(data.size, 2, dtype=torch.float64, device="cpu")
    everyone[data.rank] = torch.tensor(best, dtype=torch.float64, device="cpu")
    data.wait(data.all_reduce(everyone), task="a trial")
    flat_s, levels_s = everyone.amax(0).tolist()
    return flat_s, levels_s


def _timed(data: Group, start: Callable[[torch.Tensor], Any]) -> float:
    """Seconds of one of ``_COUNT`` sums, ``_WINDOW`` of them at a time."""
    buffers = [torch.zeros(_NBYTES // 4, device="cpu") for _ in range(_WINDOW)]
    wait = partial(data.wait, task="a trial")
    wait(start(buffers[0]))
    wait(data.all_reduce(torch.zeros(1, device="cpu")))
    began = perf_counter()
    works: list[Any] = []
    for index in range(_COUNT):
        if len(works) == _WINDOW:
            wait(works.pop(0))
        works.append(start(buffers[index % _WINDOW]))
    for work in works:
        wait(work)
    return (perf_counter() - began) / _COUNT
