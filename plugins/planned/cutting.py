"""Where buckets are cut into chunks, and which rank sums them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch

__all__ = ["Cut", "Cutter", "Way", "cut_dealt", "cut_whole"]


class Way(NamedTuple):
    """How a gradient goes: its first bytes whole, and the others by way of an owner."""

    whole_bytes: int
    owner: int


_ALL_WHOLE: Final = Way(sys.maxsize, 0)


@dataclass(frozen=True)
class Cut:
    """The end of a chunk in its bucket, in elements.

    Args:
        owner: the rank that sums it for all; None: they sum it together.
    """

    end: int
    owner: int | None = None


#: Where a bucket is cut: from its parameters, where each begins in it, and its memory.
Cutter: TypeAlias = Callable[[Sequence[torch.Tensor], Sequence[int], torch.Tensor], Sequence[Cut]]


def cut_whole(
    parameters: Sequence[torch.Tensor],
    starts: Sequence[int],
    buffer: torch.Tensor,
    *,
    chunk_bytes: int,
) -> list[Cut]:
    """Parts alike, of about ``chunk_bytes``; 0: one."""
    return [Cut(end) for end in _ends(0, buffer.numel(), buffer.element_size(), chunk_bytes)]


def cut_dealt(
    parameters: Sequence[torch.Tensor],
    starts: Sequence[int],
    buffer: torch.Tensor,
    *,
    ways: Mapping[int, Way],
    chunk_bytes: int,
) -> list[Cut]:
    """Chunks of one owner each, or of what goes whole.

    Args:
        ways: of gradients, by the ids of their parameters.
    """
    element_bytes = buffer.element_size()
    ends: list[Cut] = []
    for parameter, start, stop in zip(
        parameters, starts, [*starts[1:], buffer.numel()], strict=True
    ):
        whole_bytes, owner = ways.get(id(parameter), _ALL_WHOLE)
        border = stop if buffer.is_complex() else min(stop, start + whole_bytes // element_bytes)
        for cut in (Cut(border), Cut(stop, owner)):
            if ends and ends[-1].owner == cut.owner:
                ends[-1] = cut
            elif cut.end > (ends[-1].end if ends else 0):
                ends.append(cut)
    return [
        Cut(end, cut.owner)
        for start, cut in zip([0, *(cut.end for cut in ends)], ends, strict=False)
        for end in _ends(start, cut.end, element_bytes, chunk_bytes)
    ]


def _ends(start: int, stop: int, element_bytes: int, chunk_bytes: int) -> list[int]:
    """Where parts alike of the elements from ``start`` to ``stop`` end."""
    numel = stop - start
    count = max(1, min(numel, round(numel * element_bytes / chunk_bytes))) if chunk_bytes else 1
    return [start + numel * part // count for part in range(1, count + 1)]
