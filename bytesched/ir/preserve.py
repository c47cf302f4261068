"""The third phase: communication is inserted, so that each reader has the piece that it reads.

Where as many ranks have parts of a piece as need it, one collective joins them; elsewhere parts are
sent one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Literal

from bytesched.errors import ConfigError
from bytesched.ir.program import Held, Operator, Piece, Program, Tensor, Transfer, covered
from bytesched.ir.replay import Link, replay


def preserve(program: Program, link: Link) -> Program:
    """A program with sends, collectives, slices and joins, for all that operators read.

    All ranks have the order in which transfers become possible on such links, if none waits for
    another.

    Raises `ConfigError` if an operator has no rank, or if what it reads is not written anywhere,
    and `CyclicPlanError` if orders cannot be kept.
    """
    inserted: list[Operator | Transfer] = []
    edges: dict[Tensor, _Edges] = {}
    for operator in program.computes:
        if operator.rank < 0:
            raise ConfigError(f"{operator.name} has no rank: place the program first")
        for held in operator.gives:
            edges.setdefault(held.piece.tensor, _Edges(program)).written(held)
    for held in dict.fromkeys(chain.from_iterable(o.takes for o in program.computes)):
        if held.piece.tensor in edges:
            edges[held.piece.tensor].read(held)
        elif held.piece.tensor != Tensor(held.piece.tensor.layer, "weight"):
            raise ConfigError(f"rank {held.rank} reads {held.piece}, which no operator writes")
    for each in edges.values():
        inserted += each.joined()
    program = replace(program, operators=(*program.computes, *inserted))
    # Transfers stand in each rank's order by when they become possible.
    spans = replay(program, link, ["compute"]).spans
    orders: dict[int, list[str]] = {rank: [] for rank in program.orders}
    for name in sorted(spans, key=lambda name: spans[name].start_s):
        placed = program.named[name]
        for rank in placed.ranks if placed.lanes else ():
            orders.setdefault(rank, []).append(name)
    return replace(program, orders={rank: tuple(names) for rank, names in orders.items()})


class _Edges:
    """Everything between the writers and the readers of one tensor."""

    def __init__(self, program: Program) -> None:
        self._program = program
        #: ranks that compute a piece
        self._holders: dict[Piece, list[int]] = {}
        self._there: set[Held] = set()
        #: ranks that need a piece and do not have it
        self._lacking: dict[Piece, list[int]] = {}
        self._inserted: list[Operator | Transfer] = []

    def written(self, held: Held) -> None:
        """A rank computes a piece."""
        self._holders.setdefault(held.piece, []).append(held.rank)
        self._there.add(held)

    def read(self, held: Held) -> None:
        """A rank needs a piece; after all writers are known."""
        if held not in self._there:
            self._lacking.setdefault(held.piece, []).append(held.rank)

    def joined(self) -> list[Operator | Transfer]:
        """What brings pieces to those that lack them."""
        together: dict[tuple[Piece, ...], list[Piece]] = {}
        for piece in self._lacking:
            sources = tuple(source for source in self._holders if source.meet(piece))
            if not covered(piece, sources):
                found = ", ".join(map(str, sources)) or "nothing of it"
                raise ConfigError(
                    f"rank {self._lacking[piece][0]} reads {piece}, but operators write {found}"
                )
            together.setdefault(sources, []).append(piece)
        for sources, pieces in together.items():
            if not self._scatter(sources, pieces):
                for piece in pieces:
                    self._bring(sources, piece)
        return self._inserted

    def _scatter(self, sources: Sequence[Piece], pieces: Sequence[Piece]) -> bool:
        """A reduce-scatter, if each holder of summands needs another part of the sum."""
        region = sources[0].region
        holders = {rank for source in sources for rank in self._holders[source]}
        needing = [rank for piece in pieces for rank in self._lacking[piece]]
        fits = (
            1 < len(pieces) == len(needing) == len(holders)
            and holders == set(needing)
            and all(len(self._holders[source]) == 1 for source in sources)
            and all(source.region == region for source in sources)
            and sum((piece.volume for piece in pieces), Fraction()) == region.volume
        )
        if fits:
            takes = [Held(self._holders[source][0], source) for source in sources]
            gives = [Held(self._lacking[piece][0], piece) for piece in pieces]
            self._transfer("reduce_scatter", takes, gives, region)
        return fits

    def _bring(self, sources: Sequence[Piece], piece: Piece) -> None:
        """One piece to all ranks that lack it."""
        left = set(self._lacking[piece])
        for group in self._groups(sources):
            ranks = {held.rank for held in group}
            kind: Literal["all_reduce", "all_gather"] | None = None
            if all(source.region == piece for source in sources):
                kind = "all_reduce"
            elif all(source.summand == piece.summand for source in sources):
                kind = "all_gather"
            complete = len(group) == len(sources)
            within = all(source.meet(piece) == source for source in sources)
            if kind and complete and within and len(ranks) > 1 and ranks <= left:
                gives = [Held(rank, piece) for rank in sorted(ranks)]
                self._transfer(kind, group, gives, piece)
                left -= ranks
        for rank in sorted(left):
            self._send(sources, piece, rank)

    def _groups(self, sources: Sequence[Piece]) -> Iterator[list[Held]]:
        """Ranks that have every source: as many groups as the rarest ones have holders.

        What several of a group have counts once, from the first of them.
        """
        holders = [sorted(self._holders[source]) for source in sources]
        fewest = min(map(len, holders))
        for group in zip(*(ranks for ranks in holders if len(ranks) == fewest), strict=True):
            chosen = [next((rank for rank in ranks if rank in group), None) for ranks in holders]
            yield [
                Held(rank, source)
                for rank, source in zip(chosen, sources, strict=True)
                if rank is not None
            ]

    def _send(self, sources: Sequence[Piece], piece: Piece, rank: int) -> None:
        """One piece to one rank, part by part."""
        parts = []
        for source in sources:
            part = source.meet(piece)
            assert part is not None
            parts.append(part)
            holders = self._holders[source]
            holder = rank if rank in holders else holders[rank % len(holders)]
            self._local("slice", holder, [source], part)
            if Held(rank, part) not in self._there:
                self._transfer("send", [Held(holder, part)], [Held(rank, part)], part)
        self._local("join", rank, parts, piece)

    def _local(
        self, phase: Literal["slice", "join"], rank: int, reads: Collection[Piece], piece: Piece
    ) -> None:
        if Held(rank, piece) in self._there:
            return
        self._there.add(Held(rank, piece))
        name = f"{phase} {piece} on {rank}"
        self._inserted.append(
            Operator(name, piece.tensor.layer, phase, 0.0, tuple(reads), (piece,), rank=rank)
        )

    def _transfer(
        self,
        kind: Literal["send", "all_reduce", "all_gather", "reduce_scatter"],
        takes: Sequence[Held],
        gives: Sequence[Held],
        largest: Piece,
    ) -> None:
        self._there.update(gives)
        ranks = sorted({held.rank for held in (*takes, *gives)})
        if kind == "send":
            ranks = [takes[0].rank, gives[0].rank]
        name = f"{kind} {largest} {'-'.join(map(str, ranks))}"
        nbytes = self._program.nbytes(largest)
        self._inserted.append(Transfer(name, kind, tuple(takes), tuple(gives), nbytes))
