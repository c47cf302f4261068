"""Pieces of tensors: which rows, which columns and which summand a rank has."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

__all__ = ["WHOLE", "Axis", "Piece", "Share", "Tensor", "covered"]

#: in what a tensor can be split: samples, features, and terms whose sum it is
Axis = Literal["rows", "columns", "summand"]


@dataclass(frozen=True)
class Share:
    """One of ``of`` equal parts: what has a number that is ``index`` modulo ``of``."""

    index: int = 0
    of: int = 1

    def part(self, index: int, of: int) -> Share:
        """One of ``of`` equal parts of this one."""
        return Share(self.index + self.of * index, self.of * of)

    def meet(self, other: Share) -> Share | None:
        """What both have; None if that is nothing."""
        common = math.gcd(self.of, other.of)
        if (self.index - other.index) % common:
            return None
        # The Chinese remainder theorem.
        steps = (other.index - self.index) // common
        inverse = pow(self.of // common, -1, other.of // common)
        of = self.of * other.of // common
        return Share((self.index + self.of * (steps * inverse)) % of, of)


WHOLE = Share()


class Tensor(NamedTuple):
    """What a layer gives, or what it learns; or the gradient of either."""

    layer: str
    what: Literal["output", "weight"]
    is_gradient: bool = False

    @property
    def gradient(self) -> Tensor:
        """Its gradient."""
        return self._replace(is_gradient=True)

    def __str__(self) -> str:
        weight = ".weight" if self.what == "weight" else ""
        return f"{self.layer}{weight}{'.grad' if self.is_gradient else ''}"


@dataclass(frozen=True)
class Piece:
    """A layout, from one rank's side: the part of a tensor that it has.

    Replicated: several ranks have the same piece. Split: they have different rows or columns.
    Partial sums: they have different summands.
    """

    tensor: Tensor
    rows: Share = WHOLE
    columns: Share = WHOLE
    summand: Share = WHOLE

    def part(self, axis: Axis, index: int, of: int) -> Piece:
        """One of ``of`` equal parts."""
        share: Share = getattr(self, axis)
        changed: dict[str, Any] = {axis: share.part(index, of)}
        return replace(self, **changed)

    def meet(self, other: Piece) -> Piece | None:
        """What lies in both; None if nothing does."""
        rows, columns = self.rows.meet(other.rows), self.columns.meet(other.columns)
        summand = self.summand.meet(other.summand)
        if self.tensor != other.tensor or rows is None or columns is None or summand is None:
            return None
        return Piece(self.tensor, rows, columns, summand)

    @property
    def region(self) -> Piece:
        """The same rows and columns, summed."""
        return replace(self, summand=WHOLE)

    @property
    def fraction(self) -> Fraction:
        """Of the numbers of its tensor, how many it has."""
        return Fraction(1, self.rows.of * self.columns.of)

    @property
    def volume(self) -> Fraction:
        """Of the terms of its tensor, how many it has."""
        return self.fraction / self.summand.of

    def __str__(self) -> str:
        shares = {"rows": self.rows, "columns": self.columns, "summand": self.summand}
        parts = [f"{axis} {s.index}/{s.of}" for axis, s in shares.items() if s.of > 1]
        return f"{self.tensor}[{', '.join(parts)}]" if parts else str(self.tensor)


def covered(piece: Piece, sources: Collection[Piece]) -> bool:
    """Whether sources have each term of a piece once."""
    met = [source.meet(piece) for source in set(sources)]
    return sum((part.volume for part in met if part is not None), Fraction()) == piece.volume
