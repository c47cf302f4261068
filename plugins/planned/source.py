"""Where chunks come from: rounds of gradients, handed out in buckets.

A source says when a bucket can be summed and when a round is over; from then on the gradients that
everyone sees wait for their sums (proxies.pending_grads).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from enum import Enum
from typing import ClassVar, Protocol

import torch
from torch import nn

from .buckets import ALONE, Bucket, Chunk, Member, Sums
from .cutting import Cutter


class Phase(Enum):
    """How far a round is."""

    IDLE = "no round is open"
    OPEN = "buckets are handed out"
    COMPLETE = "all buckets are handed out, gradients are not"


class Listener(Sums, Protocol):
    """What is told of chunks and rounds, in the thread of backward."""

    def round_begins(self) -> None:
        """The first bucket of a round is ready."""

    def layout_changes(self) -> None:
        """There are other buckets, or other memory for them."""

    def ready(self, chunks: Sequence[Chunk], *, is_last: bool) -> None:
        """These can be summed. In a hook of autograd: nothing may wait.

        Args:
            is_last: they are those of the last bucket of the round.
        """

    def land(self, bucket: Bucket, why: str = "") -> None:
        """Returns when the sum of ``bucket`` is there, and handed back.

        Args:
            why: why it has to be here inside backward; empty if that is as usual.
        """

    def round_ends(self, buckets: Sequence[Bucket], *, is_early: bool) -> None:
        """Gradients are what everyone sees; with ``is_early`` they have been summed."""


class Source:
    """Rounds of one model.

    Args:
        holds_gradients: ``p.grad`` lies in a bucket.
        cut: see `Bucket`.
    """

    #: rounds after which buckets are what they stay; their sums land inside backward
    early_rounds: ClassVar[int]

    def __init__(self, listener: Listener, cut: Cutter, *, holds_gradients: bool = False) -> None:
        self._listener = listener
        self._holds_gradients = holds_gradients
        self.cut = cut
        #: nobody writes sums into gradients but their buckets, when they are handed back
        self._are_local = False
        self.phase = Phase.IDLE
        #: rounds of which every bucket was handed out
        self.rounds = 0
        #: the same, since the beginning
        self.finished = 0
        #: buckets, of all rounds
        self.handed_out = 0
        #: those of the last layout, and of the open round
        self.buckets: list[Bucket] = []
        self._opened: list[Bucket] = []

    @property
    def is_early(self) -> bool:
        """Whether buckets may still change."""
        return self.rounds < self.early_rounds

    def backward_begins(self, parameters: Sequence[nn.Parameter]) -> None:
        """A backward pass begins; nothing is under way.

        Args:
            parameters: those of the model.
        """
        self.phase = Phase.IDLE

    def let_go(self, first: int = 0) -> None:
        """The buckets from ``first`` on are none any more."""
        for bucket in self.buckets[first:]:
            if not bucket.is_under_way:
                bucket.let_go()
        del self.buckets[first:]

    def members(self) -> Iterator[Member]:
        """Those of the buckets that the open round has handed out."""
        for bucket in self._opened:
            yield from bucket.members

    def _hand_out(self, bucket: Bucket, left: Container[int] = ()) -> bool:
        """Gradients wait from now on; False if others see their memory, and cannot wait.

        Args:
            left: ids of parameters that no rank has used, whose gradients stay as they are.
        """
        can_wait = not (bucket.holds_gradients and bucket.is_seen)
        # No call of Python for each of them.
        use_count = torch._C._storage_Use_Count
        for member in bucket.members:
            if left and id(member.parameter) in left:
                continue
            grad = member.parameter.grad
            if grad is None and self._are_local:
                # There was none, or a hook has taken it.
                grad = member.parameter.grad = torch.empty_like(member.parameter)
            if grad is None:
                continue
            if bucket.holds_gradients:
                if grad.data_ptr() != member.view.data_ptr():
                    continue
            else:
                storage = grad.untyped_storage()
                # Torch did not allocate the memory of arrays, files and the like.
                if use_count(storage._cdata) > ALONE or not storage.resizable():
                    can_wait = False
            if type(grad) is not torch.Tensor or grad.requires_grad:
                can_wait = False
            member.hand_out(grad)
        return can_wait

    def _land(self, buckets: Sequence[Bucket], why: str = "") -> None:
        for bucket in buckets:
            self._listener.land(bucket, why)
