"""What each rank updates of every parameter: all of it, none, or some of its elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import nn

from bytesched.errors import PluginError

from ..layout import elements
from ..planned.bundles import Slot
from ..planned.owners import bounds_of, has_parts, owners_or_cuts

#: of a tensor of which every rank updates a part
_CUT_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Piece:
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
        slots: all parameters, in registration order.
        kinds: which optimizer updates each, by number; -1: none.
        may_cut: whether any part of it can be updated alone.
        run_bytes: neighbours up to so many have one owner.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        kinds: Sequence[int],
        may_cut: Sequence[bool],
        *,
        ranks: int,
        rank: int,
        run_bytes: int,
    ) -> None:
        nbytes = [slot.parameter.nbytes for slot in slots]
        numels = [slot.parameter.numel() for slot in slots]
        may_cut = [may and has_parts(n, ranks) for may, n in zip(may_cut, numels, strict=True)]
        # Of each operation every rank sends and takes the same, so that links are busy both ways.
        cut = {at for at, n in enumerate(nbytes) if may_cut[at] and n >= _CUT_BYTES}
        owners = owners_or_cuts(nbytes, kinds, may_cut, ranks, run_bytes, cut)
        self.rank = rank
        #: by the id of its parameter, in the order of ranks
        self.pieces: dict[int, list[Piece]] = {}
        for slot, owner, numel in zip(slots, owners, numels, strict=True):
            if owner is not None:
                pieces = [Piece(owner, 0, numel)]
            else:
                ends = bounds_of(numel, ranks)
                pieces = [Piece(r, a, b) for r, (a, b) in enumerate(pairwise([0, *ends]))]
            self.pieces[id(slot.parameter)] = pieces

    def of(self, parameter: torch.Tensor) -> list[Piece]:
        """Those of ``parameter``."""
        return self.pieces[id(parameter)]

    def own(self, parameter: torch.Tensor) -> Piece | None:
        """What this rank updates of it."""
        pieces = self.pieces[id(parameter)]
        piece = pieces[self.rank if len(pieces) > 1 else 0]
        return piece if piece.rank == self.rank else None

    def is_whole_here(self, parameter: torch.Tensor) -> bool:
        """Whether this rank updates all of it."""
        return not self.is_cut(parameter) and self.own(parameter) is not None

    def is_cut(self, parameter: torch.Tensor) -> bool:
        """Whether each rank updates a part of it."""
        return len(self.pieces[id(parameter)]) > 1


class Part:
    """Some elements of a parameter, as a parameter of one dimension that an optimizer updates."""

    def __init__(self, slot: Slot, piece: Piece) -> None:
        self.parameter = slot.parameter
        self.piece = piece
        self._slot = slot
        #: has the shape and the strides that the parameter had when it was dealt to owners
        self.like = torch.empty_strided(
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
        self.alias.grad = elements(gradient, self.like, self.piece.start, self.piece.stop)
        return is_new

    def of(self, tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The elements ``piece`` of a tensor of the parameter's shape and strides, no copy."""
        if tensor.stride() != self.like.stride():
            raise PluginError(
                f"{self._slot.name!r} was given strides {tensor.stride()}, it had "
                f"{self.like.stride()} when its update was dealt to several ranks: with "
                "shard=True, set memory formats before the first backward pass"
            )
        return elements(tensor, self.like, piece.start, piece.stop)
