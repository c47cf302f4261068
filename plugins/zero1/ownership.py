"""What each rank updates of every parameter: all of it, none, or some of its elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import nn

from bytesched.errors import PluginError

from ..layout import elements, is_dense
from ..planned.bundles import Slot

#: of a tensor of which every rank updates a part
_CUT_BYTES: Final = 64 << 10
#: by how much more than its share of an optimizer's a rank may hold before more is cut
_UNEVEN: Final = 0.03
#: Elements. Kernels of CPUs compute the last ones of a range by other instructions than those
#: before, in steps of two of the longest vectors: parts of whole steps keep every element's bits.
_STEP: Final = 64


class Piece(NamedTuple):
    """Elements of a parameter, in the order of memory, that one rank updates."""

    rank: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many."""
        return self.stop - self.start


class Ownership:
    """The pieces of all parameters; the same on all ranks.

    Args:
        run_bytes: neighbours up to so many have one owner.
    """

    def __init__(self, ranks: int, rank: int, run_bytes: int) -> None:
        self.ranks, self.rank = ranks, rank
        self._run_bytes = run_bytes
        #: by the id of its parameter, in the order of ranks
        self._pieces: dict[int, list[Piece]] = {}

    def deal(self, parameters: Sequence[torch.Tensor], *, can_cut: bool) -> None:
        """``parameters`` have owners from now on: those of one optimizer, or of none.

        Args:
            can_cut: it can update any part of what is dense alone.
        """
        shortest = self.ranks * _STEP
        cuts = [can_cut and is_dense(p) and p.numel() >= shortest for p in parameters]
        owners = owners_of([p.nbytes for p in parameters], cuts, self.ranks, self._run_bytes)
        for parameter, owner in zip(parameters, owners, strict=True):
            numel = parameter.numel()
            pieces = [Piece(owner, 0, numel)] if owner is not None else cut(numel, self.ranks)
            self._pieces[id(parameter)] = pieces

    def of(self, parameter: torch.Tensor) -> list[Piece]:
        """Those of ``parameter``."""
        return self._pieces[id(parameter)]

    def own(self, parameter: torch.Tensor) -> Piece | None:
        """What this rank updates of it."""
        pieces = self.of(parameter)
        piece = pieces[self.rank if len(pieces) > 1 else 0]
        return piece if piece.rank == self.rank else None

    def is_whole_here(self, parameter: torch.Tensor) -> bool:
        """Whether this rank updates all of it."""
        return not self.is_cut(parameter) and self.own(parameter) is not None

    def is_cut(self, parameter: torch.Tensor) -> bool:
        """Whether each rank updates a part of it."""
        return len(self.of(parameter)) > 1


def owners_of(
    nbytes: Sequence[int], may_cut: Sequence[bool], ranks: int, run_bytes: int
) -> list[int | None]:
    """The owner of each of one optimizer's tensors; None where every rank owns a part of it.

    Large ones are cut, so that of each operation every rank sends and takes the same and links are
    busy both ways; and of the others the largest, until no rank has more than 3 % above its share.
    """
    spare = _UNEVEN * sum(nbytes) / ranks
    # What goes together must not be what makes it uneven.
    run_bytes = min(run_bytes, int(spare))
    shared = {at for at, n in enumerate(nbytes) if may_cut[at] and n >= _CUT_BYTES}
    while True:
        owners, loads = _whole_owners(nbytes, shared, ranks, run_bytes)
        left = [at for at in owners if may_cut[at] and nbytes[at] > run_bytes]
        if not left or max(loads) - sum(loads) / ranks <= spare:
            return [owners.get(at) for at in range(len(nbytes))]
        shared.add(max(left, key=nbytes.__getitem__))


def _whole_owners(
    nbytes: Sequence[int], shared: set[int], ranks: int, run_bytes: int
) -> tuple[dict[int, int], list[int]]:
    """The owner of each that is not ``shared``, and how many bytes each rank has of them.

    Neighbours of less than ``run_bytes`` go together, so that there are few small pieces. The
    largest go first, each to the rank that has least (Graham, 1969): at most 4/3 - 1/3n of the
    best.
    """
    runs: list[tuple[int, list[int]]] = []
    for at, n in enumerate(nbytes):
        if at in shared:
            continue
        if runs and runs[-1][0] < run_bytes and n < run_bytes:
            size, run = runs.pop()
            runs.append((size + n, [*run, at]))
        else:
            runs.append((n, [at]))
    owners, loads = {}, [0] * ranks
    for size, run in sorted(runs, key=lambda run: -run[0]):
        owner = loads.index(min(loads))
        loads[owner] += size
        owners.update(dict.fromkeys(run, owner))
    return owners, loads


def cut(elements: int, ranks: int) -> list[Piece]:
    """The part of each rank of a tensor that all own: even, aligned, none empty."""
    ends = [elements * (rank + 1) // ranks // _STEP * _STEP for rank in range(ranks - 1)]
    bounds = pairwise([0, *ends, elements])
    return [Piece(rank, start, stop) for rank, (start, stop) in enumerate(bounds)]


def refuse_overlaps(slots: Sequence[Slot]) -> None:
    """Raises `PluginError` where memory would have two owners."""
    placed = sorted((s.parameter.data_ptr(), s.parameter.nbytes, s.name) for s in slots)
    placed = [one for one in placed if one[1]]
    for (start, nbytes, name), (other_start, _, other) in pairwise(placed):
        if other_start < start + nbytes:
            raise PluginError(
                f"shard = True: parameters {name!r} and {other!r} are over one memory, which would "
                "have two owners; make them one Parameter"
            )


class Part:
    """Some elements of a parameter, as a parameter of one dimension that an optimizer updates."""

    def __init__(self, slot: Slot, piece: Piece) -> None:
        self.parameter = slot.parameter
        self.piece = piece
        self._slot = slot
        #: has the shape and the strides that the parameter had when it was dealt to owners
        self._like = torch.empty_strided(
            slot.parameter.shape, slot.parameter.stride(), device="meta"
        )
        self.alias = self.parameter

    def take(self, gradient: torch.Tensor) -> bool:
        """The next update reads its elements of ``gradient``; whether there is a new alias."""
        mine = self.of(self.parameter.detach(), self.piece)
        is_new = self.alias is self.parameter or self.alias.data_ptr() != mine.data_ptr()
        if is_new:
            self.alias = nn.Parameter(mine, self.parameter.requires_grad)
            self._slot.parts = 1
            self._slot.count_uses()
        self.alias.grad = elements(gradient, self._like, self.piece.start, self.piece.stop)
        return is_new

    def of(self, tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The elements ``piece`` of a tensor of the parameter's shape and strides, no copy."""
        if tensor.stride() != self._like.stride():
            raise PluginError(
                f"{self._slot.name!r} was given strides {tensor.stride()}, it had "
                f"{self._like.stride()} when its update was dealt to several ranks: with "
                "shard=True, set memory formats before the first backward pass"
            )
        return elements(tensor, self._like, piece.start, piece.stop)
