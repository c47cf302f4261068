"""Which rank sends a stage to which, and when: the same on all ranks, and pure.

Rank ``k`` is the home of stage ``k``. The stages come to every rank in the order of the
model, then in the opposite one; between the two the last one stays where it is. They come to rank
0 from their home, and to every other rank from the one before it, unless it is their home.
Gradients are passed from rank to rank, each of which adds its own, and by the last one home.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple


class Cargo(Enum):
    """What is on its way."""

    #: weights for the forward pass
    FORWARD = 0
    #: weights for the backward pass
    BACKWARD = 1
    #: the sum of the gradients so far
    GRADIENT = 2
    #: that of all ranks, on its way home
    HOME = 3


WEIGHTS: Final = frozenset({Cargo.FORWARD, Cargo.BACKWARD})
_TAGS_PER_CARGO: Final = 1 << 20


class Route(NamedTuple):
    """One stage's cargo to one rank."""

    cargo: Cargo
    stage: int
    to: int


def visits(ranks: int) -> list[tuple[Cargo, int]]:
    """The stages in the order in which a rank computes with them."""
    forward = [(Cargo.FORWARD, k) for k in range(ranks)]
    return forward + [(Cargo.BACKWARD, k) for k in reversed(range(ranks))]


def source(rank: int, cargo: Cargo, stage: int, ranks: int) -> int | None:
    """The rank that the weights come from; None if they are there already."""
    if rank == stage or (cargo is Cargo.BACKWARD and stage == ranks - 1):
        return None
    return rank - 1 if rank else stage


def sends(rank: int, ranks: int) -> list[Route]:
    """Everything that ``rank`` sends in a step, most urgent first."""
    found = []
    for cargo, k in visits(ranks):
        found += [
            Route(cargo, k, to)
            for to in dict.fromkeys((0, rank + 1))
            if to < ranks and source(to, cargo, k, ranks) == rank
        ]
        if cargo is Cargo.BACKWARD:
            if rank < ranks - 1:
                found.append(Route(Cargo.GRADIENT, k, rank + 1))
            elif k != rank:
                found.append(Route(Cargo.HOME, k, k))
    return found


def name_of(cargo: Cargo, index: int) -> str:
    """Of a stage's cargo, for people."""
    return f"{cargo.name.lower()} {index}"


def tag_of(cargo: Cargo, index: int, number: int) -> int:
    """The tag of a message between two ranks: chunk ``number`` of a stage's cargo."""
    return (index * len(Cargo) + cargo.value) * _TAGS_PER_CARGO + number + 1
