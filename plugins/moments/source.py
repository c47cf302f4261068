"""Moments as the source of chunks: they lie in the buckets for good, and are sent from there."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

import torch

from ..planned.buckets import Bucket, Member
from ..planned.entries import Entry
from ..planned.hook_source import HookSource
from .slots import MomentSlot

__all__ = ["MomentSource"]


class MomentEntry(Entry):
    """One parameter, whose moments are both halves of what it has in a bucket."""

    __slots__ = ("_member",)

    slot: MomentSlot
    _member: Member

    @property
    def numel(self) -> int:
        """See `Entry`."""
        return 2 * super().numel

    def let_go(self) -> None:
        """See `Entry`: moments stay until they are laid out anew."""

    def lay_out(self, member: Member, memory: torch.Tensor) -> None:
        """See `Entry`."""
        self._member = member
        self.slot.lay_out(memory)

    def fill(self, scale: float) -> bool:
        """See `Entry`: gradients were scaled as they were folded."""
        self.slot.awaits = self._member.chunks
        return True


class MomentSource(HookSource):
    """The moments of one model's parameters, after each mini-batch."""

    entry_kind: ClassVar[type[Entry]] = MomentEntry

    def _hand_out(self, bucket: Bucket, left: Container[int] = ()) -> bool:
        """See `Source`: what waits for sums is ``step()`` alone."""
        for member in bucket.members:
            entry = self._by_id[id(member.parameter)]
            assert isinstance(entry, MomentEntry)
            entry.slot.release()
        return True
