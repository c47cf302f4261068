"""Which of two ranks sums which gradient, where all-reduces go in two halves; what goes whole.

Owners have whole tensors, so that a norm is the same number whoever takes it. What backward
computes first goes whole, as far as the link has time for it: its way back is over before anything
waits.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

__all__ = ["Gradient", "Way", "dealt"]

#: by how much the last sum may end later before that counts as a delay
_UNNOTICED: Final = 1.002
#: how finely it is tried what goes whole: so many units of neighbours, in so many parts
_UNITS: Final = 48
_PARTS: Final = 4


@dataclass(frozen=True)
class Gradient:
    """One gradient in a bucket."""

    #: of its parameter
    key: int
    nbytes: int
    #: the number of its bucket, and when that is ready on the last rank
    bucket: int = 0
    ready_s: float = 0.0


class Way(NamedTuple):
    """How a gradient goes: its first bytes whole, and the others by way of an owner."""

    whole_bytes: int
    owner: int


def dealt(
    gradients: Sequence[Gradient], seconds_per_byte: float, late: Container[int] = ()
) -> dict[int, Way]:
    """The way of each of ``gradients``, by key; the same for the same numbers.

    Args:
        gradients: in the order in which they are sent.
        seconds_per_byte: of a whole all-reduce; 0 if that is not known.
        late: keys of what goes whole in any case.
    """

    ways = _dealt(gradients, late)
    if not seconds_per_byte:
        return ways
    limit_s = _UNNOTICED * _end_s(gradients, ways, seconds_per_byte)
    for unit in _units(gradients):
        for part in range(_PARTS, 0, -1):
            tried = ways | {
                gradient.key: Way(gradient.nbytes * part // _PARTS, ways[gradient.key].owner)
                for gradient in unit
                if gradient.key not in late
            }
            if _end_s(gradients, tried, seconds_per_byte) <= limit_s:
                ways = tried
                break
    return ways


def _dealt(gradients: Sequence[Gradient], late: Container[int]) -> dict[int, Way]:
    """Each bucket is dealt to the rank that has least.

    So what is still to come is even over the ranks at any time, above all at the end.
    """
    ways: dict[int, Way] = {}
    loads = [0, 0]
    for _, bucket in groupby(gradients, key=attrgetter("bucket")):
        here = list(bucket)
        dealt_bytes = sum(gradient.nbytes for gradient in here if gradient.key not in late)
        level = (sum(loads) + dealt_bytes) / 2
        owner = 0
        for gradient in here:
            if gradient.key in late:
                ways[gradient.key] = Way(gradient.nbytes, 0)
                continue
            # Neighbours of one owner go together.
            if loads[0] + gradient.nbytes / 2 > level:
                owner = 1
            loads[owner] += gradient.nbytes
            ways[gradient.key] = Way(0, owner)
    return ways


def _units(gradients: Sequence[Gradient]) -> Iterator[list[Gradient]]:
    """Neighbours, each time so many that trying all takes no time that anyone notices."""
    least_bytes = sum(gradient.nbytes for gradient in gradients) / _UNITS
    unit: list[Gradient] = []
    for gradient in gradients:
        unit.append(gradient)
        if sum(one.nbytes for one in unit) >= least_bytes:
            yield unit
            unit = []
    yield unit


def _end_s(gradients: Sequence[Gradient], ways: dict[int, Way], seconds_per_byte: float) -> float:
    """When the last sum has ended: each rank's link takes one after the other."""
    free_s = [0.0, 0.0]
    for gradient in gradients:
        whole_bytes, owner = ways[gradient.key]
        for rank in (0, 1):
            # An owner takes all that the other has; in an all-reduce as much comes to both.
            nbytes = gradient.nbytes if rank == owner else whole_bytes
            if nbytes:
                free_s[rank] = max(free_s[rank], gradient.ready_s) + seconds_per_byte * nbytes
    return max(free_s)
