"""One call of a layer: tokens go out in pieces, experts compute, and results come home."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from bytesched.errors import MismatchError

from .counts import Table
from .exchange import Exchange, begin, finish
from .peers import Peers
from .pieces import Piece
from .verdict import Failure, Verdict

__all__ = ["Round", "applied"]


class Round:
    """What all ranks' experts make of all ranks' rows; collective.

    Every rank sends in the same order whatever its experts do: one whose expert fails sends zeros
    in its place, and says so at the end.

    Args:
        experts: this rank's.
        table: how many rows each rank has for each expert.
        pieces: how they are cut.
    """

    def __init__(
        self,
        peers: Peers,
        experts: Sequence[nn.Module] | nn.ModuleList,
        table: Table,
        pieces: Sequence[Piece],
        is_urgent: bool,
    ) -> None:
        self._peers = peers
        self._experts = experts
        self._counts = table.counts
        self._pieces = pieces
        self._is_urgent = is_urgent
        #: gradients of results are sent: by every rank, or those that do would wait for ever
        self._is_differentiated = torch.is_grad_enabled() and table.is_differentiated
        self._failure: Failure | None = None

    def run(self, rows: Tensor) -> Tensor:
        """The results of ``rows``, which are sorted by expert, in that order and dtype.

        Raises MismatchError, on all ranks, if an expert of one failed.
        """
        places = [self._places(piece).to(rows.device) for piece in self._pieces]
        dispatches: list[tuple[Tensor, Exchange]] = []
        for piece, place in zip(self._pieces, places, strict=True):
            one = self._exchange("moe dispatch", *self._sizes(piece))
            dispatches.append((begin(rows[place], one), one))
        returns: list[tuple[Tensor, Exchange]] = []
        for piece, (arriving, one) in zip(self._pieces, dispatches, strict=True):
            made = self._computed(piece, finish(arriving, one))
            home = self._exchange("moe return", one.receive, one.send)
            returns.append((begin(made, home), home))
        verdict = Verdict(self._peers, self._failure, rows.device, is_urgent=self._is_urgent)
        arrived_home = torch.cat([finish(coming, home) for coming, home in returns])
        verdict.check()
        # Every row is in one place of one piece.
        return arrived_home[torch.cat(places).argsort()]

    def _exchange(self, name: str, send: list[int], receive: list[int]) -> Exchange:
        return Exchange(self._peers, send, receive, name, self._is_urgent)

    def _places(self, piece: Piece) -> Tensor:
        """Which rows of this rank belong to a piece, in the order in which they are sent."""
        mine = self._counts[self._peers.rank]
        offsets = [0]
        for count in mine:
            offsets.append(offsets[-1] + count)
        return torch.cat(
            [
                torch.arange(offsets[number], offsets[number + 1])[_slice(piece, mine[number])]
                for rank in range(self._peers.size)
                for number in self._numbers(piece, rank)
            ]
        )

    def _sizes(self, piece: Piece) -> tuple[list[int], list[int]]:
        """How many rows of a piece go to each rank, and come from each."""
        ranks, mine = range(self._peers.size), self._peers.rank
        send = [
            sum(len(piece.of(self._counts[mine][number])) for number in self._numbers(piece, rank))
            for rank in ranks
        ]
        receive = [
            sum(len(piece.of(self._counts[rank][number])) for number in self._numbers(piece, mine))
            for rank in ranks
        ]
        return send, receive

    def _computed(self, piece: Piece, arrived: Tensor) -> Tensor:
        """What this rank's experts make of a piece, ordered as it has ``arrived``: by rank."""
        size = self._peers.size
        lengths = [
            len(piece.of(self._counts[rank][number]))
            for rank in range(size)
            for number in self._numbers(piece, self._peers.rank)
        ]
        parts = arrived.split(lengths)
        each = len(piece.experts)
        # From order by rank to order by expert, and back.
        by_expert = [torch.cat(parts[index::each]) for index in range(each)]
        try:
            computed = applied([self._experts[index] for index in piece.experts], by_expert)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait
            self._failure = self._failure or Failure(error)
            computed = torch.zeros_like(arrived)
        back = computed.split([n for index in range(each) for n in lengths[index::each]])
        made = torch.cat(
            [back[index * size + rank] for rank in range(size) for index in range(each)]
        )
        if self._is_differentiated and not made.requires_grad:
            made.requires_grad_()
        return made

    def _numbers(self, piece: Piece, rank: int) -> range:
        """The numbers among all of those experts of a rank that belong to a piece."""
        own = len(self._experts)
        return range(rank * own + piece.experts.start, rank * own + piece.experts.stop)


def applied(experts: Iterable[nn.Module], parts: Sequence[Tensor]) -> Tensor:
    """What each expert makes of its part, one after the other, in the dtype of the parts.

    Raises MismatchError if it is of another shape than the part.
    """
    results = []
    for expert, part in zip(experts, parts, strict=True):
        result = expert(part)
        if result.shape != part.shape:
            raise MismatchError(
                f"an expert made {tuple(result.shape)} of rows {tuple(part.shape)}: experts must "
                "keep the shape"
            )
        results.append(result.to(part.dtype))
    return torch.cat(results)


def _slice(piece: Piece, count: int) -> slice:
    of = piece.of(count)
    return slice(of.start, of.stop)
