"""Layers and pieces of tensors, and programs of them: operators, communication, ranks' orders.

A piece is which rows, which columns and which summand of a tensor a rank has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple

from bytesched.errors import ConfigError

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


#: how layers are split; see `bytesched.ir.transform`
WAYS = frozenset({"batch", "micro", "column", "row", "feature", "copy"})


@dataclass(frozen=True)
class Layer:
    """A layer of a model, before anything is split."""

    name: str
    #: names of the layers whose outputs it reads
    inputs: tuple[str, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    #: of the global batch
    output_bytes: int = 0
    parameter_bytes: int = 0
    #: what an operator of it needs while it runs, beside what it reads and writes
    workspace_bytes: int = 0
    #: how it may be split without other results; see `bytesched.ir.transform`
    ways: frozenset[str] = WAYS


#: forward, backward or its halves (gradients of inputs, of weights), update; and what `preserve`
#: inserts on one rank, which takes no time: a part of a piece, and pieces put together
Phase = Literal["F", "B", "I", "W", "U", "slice", "join"]


class Held(NamedTuple):
    """A piece, and the rank that has it."""

    rank: int
    piece: Piece


class Lane(NamedTuple):
    """What does one thing at a time: a rank's processor, and its link in each direction."""

    of: Literal["compute", "out", "in"]
    rank: int


class Part(NamedTuple):
    """One split that an operator comes from."""

    label: str
    way: str
    share: Share


@dataclass(frozen=True)
class Operator:
    """What one rank computes as a whole."""

    name: str
    layer: str
    phase: Phase
    seconds: float
    reads: tuple[Piece, ...]
    writes: tuple[Piece, ...]
    workspace_bytes: int = 0
    parts: tuple[Part, ...] = ()
    #: -1: not placed yet
    rank: int = -1

    def at(self, label: str) -> int:
        """Which part of the split with that label it is; 0 if there was none."""
        return next((part.share.index for part in self.parts if part.label == label), 0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who takes part."""
        return (self.rank,)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What it keeps busy."""
        return () if self.phase in ("slice", "join") else (Lane("compute", self.rank),)

    @property
    def takes(self) -> tuple[Held, ...]:
        """What has to be there before it starts."""
        return tuple(Held(self.rank, piece) for piece in self.reads)

    @property
    def gives(self) -> tuple[Held, ...]:
        """What is there when it is over."""
        return tuple(Held(self.rank, piece) for piece in self.writes)


@dataclass(frozen=True)
class Transfer:
    """Communication: a send, or a collective in which all its ranks take part."""

    name: str
    kind: Literal["send", "all_reduce", "all_gather", "reduce_scatter"]
    takes: tuple[Held, ...]
    gives: tuple[Held, ...]
    #: of the largest piece that a rank has before or after
    nbytes: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({held.rank for held in (*self.takes, *self.gives)}))

    @property
    def lanes(self) -> tuple[Lane, ...]:
        if self.kind == "send":
            return (Lane("out", self.takes[0].rank), Lane("in", self.gives[0].rank))
        return tuple(lane for rank in self.ranks for lane in (Lane("out", rank), Lane("in", rank)))


@dataclass(frozen=True)
class Program:
    """Operators, and for each rank the order of those that keep one of its lanes busy."""

    layers: Mapping[str, Layer]
    operators: tuple[Operator | Transfer, ...]
    orders: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def named(self) -> Mapping[str, Operator | Transfer]:
        return {operator.name: operator for operator in self.operators}

    @property
    def computes(self) -> Iterator[Operator]:
        """The operators of layers."""
        return (o for o in self.operators if isinstance(o, Operator) and o.lanes)

    @property
    def transfers(self) -> Iterator[Transfer]:
        """What is communicated."""
        return (o for o in self.operators if isinstance(o, Transfer))

    @cached_property
    def writers(self) -> Mapping[Held, list[str]]:
        """Who writes what a rank has; weights are there from the beginning."""
        found: dict[Held, list[str]] = {}
        for operator in self.operators:
            for held in operator.gives:
                found.setdefault(held, []).append(operator.name)
        return found

    def nbytes(self, piece: Piece) -> int:
        """Bytes of a piece, rounded up; a summand has those of the sum."""
        layer = self.layers[piece.tensor.layer]
        whole = layer.output_bytes if piece.tensor.what == "output" else layer.parameter_bytes
        return -(-whole * piece.fraction.numerator // piece.fraction.denominator)

    def layer(self, name: str) -> Layer:
        """The layer of that name. Raises `ConfigError` if there is none."""
        try:
            return self.layers[name]
        except KeyError:
            raise ConfigError(
                f"the program has no layer {name!r}; it has {', '.join(self.layers)}"
            ) from None
