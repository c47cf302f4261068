"""Who sums which gradient: whole tensors over the ranks, evenly, and evenly at any time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

#: A tensor is in front if all before it have less than one part in so many of its bytes.
_FRONT: Final = 16

__all__ = [
    "bounds_of",
    "has_parts",
    "late_ones",
    "owners_or_cuts",
    "whole_owners_of",
]

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
