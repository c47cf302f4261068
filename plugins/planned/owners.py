"""Who sums which gradient: whole tensors over the ranks, evenly, and evenly at any time.

Where all-reduces go in two halves, owners have whole tensors, so that a norm is the same number
whoever takes it; and what backward computes first goes whole, as far as the link has time for it:
its way back is over before anything waits.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

#: A tensor is in front if all before it have less than one part in so many of its bytes.
_FRONT: Final = 16

#: by how much more than its share a rank may hold before a tensor is cut
_UNEVEN: Final = 0.03

#: Elements. Kernels of CPUs compute the last ones of a range by other instructions than those
#: before, in steps of two of the longest vectors: parts of whole steps keep every element's bits.
_STEP: Final = 64


def late_ones(nbytes: Sequence[int], ranks: int, run_bytes: int) -> set[int]:
    """Large tensors that one owner would have too late, from bytes in forward order.

    Their chunks are better summed by all ranks in turn, and gathered for their norm. That takes 2/n
    of the time of their two ways to and from one owner, of which the first ends before ``step()``
    can, and the second before their layer can begin. So it pays for what backward computes last and
    the forward pass needs first, such as an embedding.
    """
    late = set()
    shared_bytes = after_bytes = 0
    for index, n in enumerate(nbytes):
        # One link takes about as many bytes as backward computes meanwhile.
        alone = max(0, (ranks - 1) * n - after_bytes)
        if _FRONT * after_bytes < n:
            # Nor is there time for its way back before the forward pass needs it.
            alone += (ranks - 1) * n
        together = 2 * (ranks - 1) * (shared_bytes + n) // ranks
        after_bytes += n
        if n >= run_bytes and alone > together:
            shared_bytes += n
            late.add(index)
    return late


def whole_owners_of(
    nbytes: Sequence[int], kinds: Sequence[int], ranks: int, run_bytes: int
) -> list[int]:
    """The owner of each tensor, where owners hold what belongs to them: even bytes of each kind.

    Neighbours of less than ``run_bytes`` go together, so that there are few small chunks. The
    largest go first, each to the rank that has least (Graham, 1969): at most 4/3 - 1/3n of the
    best. A tensor is never shared, so one of more than 1/n of its kind is a rank's whole share.
    """
    runs: list[list[int]] = []
    for index, n in enumerate(nbytes):
        run = runs[-1] if runs else []
        goes_on = run and kinds[run[0]] == kinds[index] and n < run_bytes
        if goes_on and sum(nbytes[i] for i in run) < run_bytes:
            run.append(index)
        else:
            runs.append([index])
    owners = [0] * len(nbytes)
    loads: dict[int, list[int]] = {}
    for run in sorted(runs, key=lambda run: -sum(nbytes[i] for i in run)):
        _deal(run, nbytes, owners, loads.setdefault(kinds[run[0]], [0] * ranks))
    return owners


def owners_or_cuts(
    nbytes: Sequence[int],
    kinds: Sequence[int],
    may_cut: Sequence[bool],
    ranks: int,
    run_bytes: int,
    cut: Collection[int],
) -> list[int | None]:
    """The owner of each tensor, as of `whole_owners_of`; None where every rank owns a part of it.

    Those of ``cut`` are, and of others that may be cut the largest, until no rank has more than 3 %
    above its share of any kind.
    """
    totals = {
        kind: sum(n for n, of in zip(nbytes, kinds, strict=True) if of == kind)
        for kind in set(kinds)
    }
    # What goes together must not be what makes it uneven.
    together_bytes = min(run_bytes, int(_UNEVEN * min(totals.values()) / ranks))
    cut = set(cut)
    while True:
        left = [0 if index in cut else n for index, n in enumerate(nbytes)]
        owners = whole_owners_of(left, kinds, ranks, together_bytes)
        uneven = set()
        for kind, total in totals.items():
            loads = [0] * ranks
            for n, of, owner in zip(left, kinds, owners, strict=True):
                loads[owner] += n if of == kind else 0
            if (max(loads) - sum(loads) / ranks) * ranks > _UNEVEN * total:
                uneven.add(kind)
        wanted = [
            (n, -index)
            for index, n in enumerate(left)
            if kinds[index] in uneven and may_cut[index] and n > together_bytes
        ]
        if not wanted:
            return [None if index in cut else owner for index, owner in enumerate(owners)]
        cut.add(-max(wanted)[1])


def has_parts(elements: int, ranks: int) -> bool:
    """Whether a tensor is long enough for `bounds_of`."""
    return elements >= ranks * _STEP


def bounds_of(elements: int, ranks: int) -> list[int]:
    """Where each rank's part of a tensor that all own ends: even, aligned, none empty."""
    ends = [elements * (rank + 1) // ranks // _STEP * _STEP for rank in range(ranks - 1)]
    return [*ends, elements]


def _deal(run: list[int], nbytes: Sequence[int], owners: list[Any], loads: list[int]) -> None:
    owner = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
    for index in run:
        owners[index] = owner
        loads[owner] += nbytes[index]


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
