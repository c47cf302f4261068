"""Who sums which gradient: whole tensors over the ranks, evenly, and evenly at any time."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["owners_of"]


def owners_of(nbytes: Sequence[int], ranks: int, run_bytes: int) -> list[int | None]:
    """The owner of each tensor, from their bytes in forward order.

    Neighbours go together in runs of at least ``run_bytes``, so that chunks stay large. Runs are
    dealt from the last to the first, as backward computes them, to the rank that has least: so
    both directions of every link are busy at any time, not only on the whole.

    None for a tensor with more than one rank's share of all bytes: its chunks are summed by all
    ranks in turn.
    """
    share = sum(nbytes) / ranks
    owners: list[int | None] = [None] * len(nbytes)
    loads = [0] * ranks
    run: list[int] = []
    for index in reversed(range(len(nbytes))):
        if nbytes[index] > share:
            _deal(run, nbytes, owners, loads)
            run = []
            continue
        run.append(index)
        if sum(nbytes[i] for i in run) >= run_bytes:
            _deal(run, nbytes, owners, loads)
            run = []
    _deal(run, nbytes, owners, loads)
    return owners


def _deal(
    run: list[int], nbytes: Sequence[int], owners: list[int | None], loads: list[int]
) -> None:
    owner = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
    for index in run:
        owners[index] = owner
        loads[owner] += nbytes[index]
