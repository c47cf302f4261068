"""A tree over ranks, down which one rank's word reaches all: who hears from whom.

Every rank passes the word on to at most `FAN_OUT` others, so that among n ranks it takes log n
hops, and no rank sends more than that. Up to nine ranks rank 0 sends to each of them itself.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FAN_OUT", "WORD_TASKS", "children", "parent"]

FAN_OUT: Final = 8

#: Tasks that one word names at most: with their number, 256 bytes.
WORD_TASKS: Final = 31


def parent(rank: int) -> int:
    """Whom ``rank`` hears from; rank 0 hears from nobody."""
    if rank <= 0:
        raise ValueError(f"rank {rank} hears from nobody")
    return (rank - 1) // FAN_OUT


def children(rank: int, size: int, fan_out: int = FAN_OUT) -> range:
    """Whom ``rank`` of ``size`` passes the word on to."""
    first = fan_out * rank + 1
    return range(min(first, size), min(first + fan_out, size))
