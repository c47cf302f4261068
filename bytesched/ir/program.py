"""Layers of a model, and programs: operators, communication between them, each rank's order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from bytesched.errors import ConfigError
from bytesched.ir.pieces import Piece, Share

__all__ = ["WAYS", "Held", "Lane", "Layer", "Operator", "Part", "Phase", "Program", "Transfer"]

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
        """Who takes part."""
        return tuple(sorted({held.rank for held in (*self.takes, *self.gives)}))

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What it keeps busy."""
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
        """Operators by name."""
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

    def with_operators(self, operators: Sequence[Operator | Transfer]) -> Program:
        """The same layers and orders with other operators."""
        return replace(self, operators=tuple(operators))
