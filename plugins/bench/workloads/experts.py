"""What layers of experts exchange: all-to-alls of real size around compute that is emulated.

What crosses the link has the bytes of the profile. The values that matter are the few of an
emulated model, once for each other rank: all of them reach the loss, and their gradients go back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from bytesched.bench.profile import ELEMENT_BYTES
from bytesched.urgency import urgent

from ...exchanges.peers import Peers

#: begins an all-to-all of rows, one for each rank; what is called then waits for what arrives
Start = Callable[[Tensor], Callable[[], Tensor]]


def by_collectives(group: dist.ProcessGroup | None, *, is_urgent: bool) -> Start:
    """All-to-alls on a group, None being that of everything else; urgent ones hold gradients back.

    Each blocks, as models without an exchange of their own do it, from where it is waited for.
    """

    def start(sent: Tensor) -> Callable[[], Tensor]:
        received = torch.empty_like(sent)

        def exchanged() -> Tensor:
            with urgent("all-to-all") if is_urgent else nullcontext():
                dist.all_to_all_single(received, sent, group=group)
            return received

        return exchanged

    return start


def by_peers(peers: Peers) -> Start:
    """The exchange of `bytesched.plugins.moe`."""
    each = [1] * peers.size
    return lambda sent: peers.start(sent, each, each, "all-to-all", is_urgent=True).wait


class Exchanges:
    """Carries the all-to-alls of a model in some pieces, and times them.

    Experts compute on one piece while others are on their way. Pieces are sent in one order on all
    ranks: dispatches, then what experts have computed.
    """

    def __init__(self, start: Start, ranks: int, pieces: int = 1) -> None:
        self._start = start
        self._ranks = ranks
        self._pieces = pieces
        #: of each all-to-all, or piece of one: how long it was waited for
        self.taken_ms: list[float] = []
        #: of each pass through a layer: how long it waited
        self.waited_ms: list[float] = []

    def clear(self) -> None:
        """What was timed so far does not count."""
        self.taken_ms.clear()
        self.waited_ms.clear()

    def through(self, x: Tensor, nbytes: int, compute: Callable[[float], None]) -> Tensor:
        """Dispatches ``x``, computes the whole of a layer, piece by piece, and combines."""
        waited_ms = -sum(self.taken_ms)
        pieces = [piece.detach() for piece in x.tensor_split(self._pieces)]
        each = nbytes // self._pieces
        arriving = [self._begin(piece, each) for piece in pieces]
        returning = []
        for piece, wait in zip(pieces, arriving, strict=True):
            arrived = self._arrived(piece, wait)
            compute(1 / self._pieces)
            returning.append((arrived, self._begin(arrived, each)))
        found = torch.cat([self._arrived(piece, wait) for piece, wait in returning])
        self.waited_ms.append(waited_ms + sum(self.taken_ms))
        return found

    def _begin(self, piece: Tensor, nbytes: int) -> Callable[[], Tensor]:
        width = max(piece.numel(), nbytes // ELEMENT_BYTES // self._ranks)
        sent = torch.zeros(self._ranks, width)
        sent[:, : piece.numel()] = piece
        return self._start(sent)

    def _arrived(self, piece: Tensor, wait: Callable[[], Tensor]) -> Tensor:
        """What is made of a piece and what the other ranks have for it: the same map backward."""
        began_s = time.perf_counter()
        received = wait()
        self.taken_ms.append(1e3 * (time.perf_counter() - began_s))
        return (piece + received[:, : piece.numel()].mean(0)) / 2
