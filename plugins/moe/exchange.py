"""An all-to-all that gradients go through, begun in one place and awaited in another; in pieces.

Two nodes of autograd make one exchange: `begin` starts it, `finish` awaits it, and what is computed
between them overlaps. Backwards their parts are swapped: the gradient starts at `finish` and is
awaited at `begin`. Autograd runs nodes in the reverse of the order in which they were made, so
ranks that exchange in one order forwards do so backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bytesched.errors import PluginError

from ..exchanges.counts import Form
from ..exchanges.peers import Peers, Transfer, peers_of


@dataclass(eq=False)
class Exchange:
    """Sizes of one exchange, and its transfer under way in either direction."""

    peers: Peers
    send: list[int]
    receive: list[int]
    name: str
    is_urgent: bool = True
    forward: Transfer | None = None
    backward: Transfer | None = None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Exchange) -> Tensor:
        ctx.one = one
        one.forward = one.peers.start(x, one.send, one.receive, one.name, is_urgent=one.is_urgent)
        return one.forward.rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        one: Exchange = ctx.one
        assert one.backward is not None, one
        # What remembers the exchange must not keep its rows.
        transfer, one.backward = one.backward, None
        return transfer.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, one: Exchange) -> Tensor:
        ctx.one = one
        assert one.forward is not None, one
        transfer, one.forward = one.forward, None
        transfer.wait()
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        one: Exchange = ctx.one
        one.backward = one.peers.start(
            gradient, one.receive, one.send, f"{one.name} backward", is_urgent=one.is_urgent
        )
        # For the shape alone: `_Begin` has what arrives.
        return gradient, None


def begin(x: Tensor, one: Exchange) -> Tensor:
    """Starts to send; returns what `finish` takes, whose values are not here yet."""
    return _Begin.apply(x, one)  # type: ignore[no-any-return, no-untyped-call]


def finish(rows: Tensor, one: Exchange) -> Tensor:
    """What the ranks have sent to this one, by rank."""
    return _Finish.apply(rows, one)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exchange(
    x: Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Rows from every rank, as of `all_to_all_single`, urgent in both directions; collective.

    Counts may be uneven, and 0. All ranks compare them, and the form of ``x``, before anything is
    sent.

    Args:
        x: a matrix: first the rows for rank 0, then those for rank 1, and so on.
        send_counts: how many rows each rank gets.
        receive_counts: how many rows each rank sends here.
        group: the ranks; all of them if it is None.

    Raises:
        MismatchError: on all ranks alike, if sizes, dtype or width do not fit each other.
        PeerLost: a rank is gone.
        SchedulerTimeout: a rank does not come within ``BYTESCHED_TIMEOUT_S``.
    """
    send, receive = list(send_counts), list(receive_counts)
    peers = peers_of(group)
    size = 1 if peers is None else peers.size
    fits = len(send) == len(receive) == size and x.dim() == 2 and len(x) == sum(send)
    form = Form.of(x, wrong=not fits)
    if peers is None:
        if form.wrong or send != receive:
            raise PluginError(f"rows {tuple(x.shape)} do not fit counts {send} and {receive}")
        return x
    # A rank whose own counts are wrong tells the others, which would wait for it.
    counts = [*send, *receive] if fits else [0] * (2 * size)
    table = peers.gather(form, counts, x.device, is_urgent=True)
    table.check_forms()
    table.check_sizes()
    one = Exchange(peers, send, receive, "moe exchange")
    return finish(begin(x, one), one)


@dataclass(frozen=True)
class Piece:
    """Part ``part`` of ``parts`` of the tokens of ``experts``, which every rank has as many of."""

    experts: range
    part: int = 0
    parts: int = 1

    def of(self, count: int) -> range:
        """Which of an expert's ``count`` tokens from one rank belong to this piece."""
        return range(count * self.part // self.parts, count * (self.part + 1) // self.parts)

    def numbers(self, rank: int, own: int) -> range:
        """Its experts on a rank, where each has ``own``, as numbers among all."""
        return range(rank * own + self.experts.start, rank * own + self.experts.stop)


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
