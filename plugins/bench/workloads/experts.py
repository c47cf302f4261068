"""Layers of experts, emulated: all-to-alls of real size around compute that is slept.

What crosses the link has the bytes of the profile. The values that matter are the few of an
emulated model, once for each other rank: all of them reach the loss, and their gradients go back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytesched.bench.profile import ELEMENT_BYTES, LayerProfile
from bytesched.urgency import urgent

from ...exchanges.peers import Peers, Transfer

#: computes this share of a layer
Pass = Callable[[float], None]


class Exchanges:
    """Carries the all-to-alls of a model on a process group, one at a time, and times them.

    Args:
        group: of all ranks; None: that of everything else.
        is_urgent: whether gradients wait meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, is_urgent: bool) -> None:
        self._group = group
        self._is_urgent = is_urgent
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        #: of each all-to-all, or piece of one, from call to end
        self.taken_ms: list[float] = []
        #: of each pass through a layer: how long it did not compute
        self.waited_ms: list[float] = []

    def clear(self) -> None:
        """What was timed so far does not count."""
        self.taken_ms.clear()
        self.waited_ms.clear()

    def through(self, x: Tensor, nbytes: int, compute: Pass) -> Tensor:
        """Dispatches ``x``, computes, and combines."""
        began_s = time.perf_counter()
        arrived = self.exchanged(x, nbytes)
        computing_s = time.perf_counter()
        compute(1.0)
        computed_s = time.perf_counter()
        found = self.exchanged(arrived, nbytes)
        waited_s = time.perf_counter() - began_s - (computed_s - computing_s)
        self.waited_ms.append(1e3 * waited_s)
        return found

    def exchanged(self, x: Tensor, nbytes: int) -> Tensor:
        """What is made of ``x`` and what the other ranks have for it: the same map backward."""
        began_s = time.perf_counter()
        sent, received = self._buffers_for(nbytes, x.numel())
        sent[:, : x.numel()] = x
        with urgent("all-to-all") if self._is_urgent else nullcontext():
            dist.all_to_all_single(received, sent, group=self._group)
        self.taken_ms.append(1e3 * (time.perf_counter() - began_s))
        return (x + received[:, : x.numel()].mean(0)) / 2

    def close(self) -> None:
        """Lets go of the group, if it is its own."""
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _buffers_for(self, nbytes: int, least: int) -> tuple[Tensor, Tensor]:
        """To send and to receive so many bytes, a row for each rank."""
        if nbytes not in self._buffers:
            ranks = dist.get_world_size()
            width = max(least, nbytes // ELEMENT_BYTES // ranks)
            self._buffers[nbytes] = torch.zeros(ranks, width), torch.zeros(ranks, width)
        return self._buffers[nbytes]


class InPieces(Exchanges):
    """The exchange of `bytesched.plugins.moe`, cut: experts compute on one piece meanwhile.

    Pieces are sent in one order on all ranks: dispatches, then what experts have computed. Of each,
    ``taken_ms`` has how long it was waited for.
    """

    def __init__(self, peers: Peers, *, count: int) -> None:
        super().__init__(None, is_urgent=True)
        self._peers = peers
        self._count = count

    def through(self, x: Tensor, nbytes: int, compute: Pass) -> Tensor:
        pieces = [piece.detach() for piece in x.tensor_split(self._count)]
        each = nbytes // self._count
        waited_ms = -sum(self.taken_ms)
        arriving = [self._begin(piece, each) for piece in pieces]
        returning = []
        for piece, transfer in zip(pieces, arriving, strict=True):
            arrived = self._arrived(piece, transfer)
            compute(1 / self._count)
            returning.append((arrived, self._begin(arrived, each)))
        found = torch.cat([self._arrived(piece, transfer) for piece, transfer in returning])
        self.waited_ms.append(waited_ms + sum(self.taken_ms))
        return found

    def _begin(self, piece: Tensor, nbytes: int) -> Transfer:
        ranks = self._peers.size
        sent = torch.zeros(ranks, max(piece.numel(), nbytes // ELEMENT_BYTES // ranks))
        sent[:, : piece.numel()] = piece
        return self._peers.start(sent, [1] * ranks, [1] * ranks, "all-to-all", is_urgent=True)

    def _arrived(self, piece: Tensor, transfer: Transfer) -> Tensor:
        began_s = time.perf_counter()
        received = transfer.wait()
        self.taken_ms.append(1e3 * (time.perf_counter() - began_s))
        return (piece + received[:, : piece.numel()].mean(0)) / 2


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: EmulatedExperts) -> Tensor:
        ctx.experts = experts
        return experts.through(x, experts.forward_s)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return ctx.experts.through(grad, ctx.experts.backward_s), None


class EmulatedExperts(nn.Module):
    """A layer of experts, which have no gradients to send: `exchanges` carries what they get.

    Without one, it computes alone.

    Args:
        pace: what computes for a number of seconds.
    """

    def __init__(self, profile: LayerProfile, pace: Any) -> None:
        super().__init__()
        self._pace = pace
        self._nbytes = profile.exchange_bytes
        self.forward_s = profile.forward_ms / 1e3
        self.backward_s = profile.backward_ms / 1e3
        self.exchanges: Exchanges | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Values of the same shape that depend on those of all ranks."""
        y: Tensor = _Through.apply(x, self)  # type: ignore[no-untyped-call]
        return y

    def through(self, x: Tensor, duration_s: float) -> Tensor:
        """One direction: what is to be exchanged, computed and exchanged again."""

        def compute(share: float) -> None:
            self._pace.start()
            self._pace.finish(share * duration_s)

        if self.exchanges is not None:
            return self.exchanges.through(x, self._nbytes, compute)
        compute(1.0)
        return x.clone()
