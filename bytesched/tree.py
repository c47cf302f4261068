"""A tree over ranks, down which one rank's word reaches all: who hears from whom.

Every rank passes the word on to at most `FAN_OUT` others, so that among n ranks it takes log n
hops, and no rank sends more than that. Up to nine ranks rank 0 sends to each of them itself.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FAN_OUT", "children", "depth", "parent"]

FAN_OUT: Final = 8


def parent(rank: int) -> int:
    """Whom ``rank`` hears from; rank 0 hears from nobody."""
    if rank <= 0:
        raise ValueError(f"rank {rank} hears from nobody")
    return (rank - 1) // FAN_OUT


def children(rank: int, size: int) -> range:
    """Whom ``rank`` of ``size`` passes the word on to."""
    first = FAN_OUT * rank + 1
    return range(min(first, size), min(first + FAN_OUT, size))


def depth(size: int) -> int:
    """Hops from rank 0 to the last of ``size`` ranks."""
    hops, rank = 0, size - 1
    while rank > 0:
        hops, rank = hops + 1, parent(rank)
    return hops
