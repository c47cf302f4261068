"""Ways to run branches beside each other: which of them share a lane, and how wide a lane is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product

__all__ = ["capacities", "lanes_of"]


def lanes_of(branches: int, widths: Sequence[int], devices: int) -> Iterator[tuple[int, ...]]:
    """Every way to give branches to lanes: the lane of each; see `capacities`.

    Lane 0 may be any group of them, as it has the devices that the join is on; the others are
    numbered by their first branch. There are as many lanes as fit at least.
    """
    most = max(n for n in range(1, devices + 1) if n * min(widths) <= devices)
    for groups in _groupings(branches, most):
        count = max(groups) + 1
        for home in range(count):
            order = [home, *(group for group in range(count) if group != home)]
            yield tuple(order.index(group) for group in groups)


def _groupings(branches: int, most: int) -> Iterator[tuple[int, ...]]:
    """Partitions of branches into at most so many groups, numbered by their first member."""

    def grow(groups: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(groups) == branches:
            yield groups
            return
        for group in range(min(most, max(groups) + 2)):
            yield from grow((*groups, group))

    yield from grow((0,))


@lru_cache(maxsize=256)
def capacities(lanes: int, widths: tuple[int, ...], devices: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of devices for each lane, none of which could be given more."""
    larger = dict(pairwise(widths))

    def could_grow(capacity: tuple[int, ...]) -> bool:
        free = devices - sum(capacity)
        return any(width in larger and larger[width] - width <= free for width in capacity)

    return tuple(
        capacity
        for capacity in product(widths, repeat=lanes)
        if sum(capacity) <= devices and not could_grow(capacity)
    )
