"""How a dispatch is cut: whole experts first, then slices of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Piece:
    """Part ``part`` of ``parts`` of the tokens of ``experts``, which every rank has as many of."""

    experts: range
    part: int = 0
    parts: int = 1

    def of(self, count: int) -> range:
        """Which of an expert's ``count`` tokens from one rank belong to this piece."""
        return range(count * self.part // self.parts, count * (self.part + 1) // self.parts)


def number_of_pieces(sent_bytes: Sequence[int], piece_bytes: int, most: int) -> int:
    """One for each ``piece_bytes`` of what the busiest rank sends; at least 1, at most ``most``."""
    return min(max(1, -(-max(sent_bytes) // piece_bytes)), most)


def cut(experts: int, pieces: int) -> list[Piece]:
    """At most ``pieces`` pieces that together are all tokens of a rank's ``experts``.

    While there are at least as many experts as pieces, each expert computes once, on all its
    tokens, and gradients have the bits of an exchange in one piece. With more pieces, an expert
    computes several times on slices, all experts alike.
    """
    if pieces <= experts:
        bounds = [experts * piece // pieces for piece in range(pieces + 1)]
        return [Piece(range(begin, end)) for begin, end in pairwise(bounds)]
    parts = pieces // experts
    return [
        Piece(range(expert, expert + 1), part, parts)
        for expert in range(experts)
        for part in range(parts)
    ]
