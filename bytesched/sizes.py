"""Partition and credit sizes from what the link can do."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Link", "chosen_sizes"]

#: chunks in flight: with two outstanding a link is full, the third covers the leader's word
_WINDOW = 3
_SMALLEST = 64 * 1024
_LARGEST = 32 * 2**20
#: a cut anywhere must stay a whole number of elements of any dtype
_GRAIN = 4096


@dataclass(frozen=True, slots=True)
class Link:
    """A link as an all-reduce sees it: ``overhead_s + nbytes / bytes_per_s``."""

    overhead_s: float
    bytes_per_s: float


def chosen_sizes(
    link: Link, *, model_bytes: int, partition_bytes: int = 0, credit_bytes: int = 0
) -> tuple[int, int]:
    """``(partition_bytes, credit_bytes)``; what is given stays, what is 0 is chosen.

    The partition balances the overhead of many chunks against the delay of one in flight: with a
    credit of k partitions the bound ``T* + θN + (c + δ)/B`` is least at ``sqrt(θBS/(k + 1))``.
    """
    if not partition_bytes:
        best = math.sqrt(link.overhead_s * link.bytes_per_s * model_bytes / (_WINDOW + 1))
        bounded = min(max(best, _SMALLEST), _LARGEST)
        partition_bytes = max(_GRAIN, round(bounded / _GRAIN) * _GRAIN)
    if not credit_bytes:
        credit_bytes = _WINDOW * partition_bytes
    return partition_bytes, credit_bytes
