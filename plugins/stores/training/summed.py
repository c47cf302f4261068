"""A session whose gradients a store sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ...planned.hook_source import HookSource
from ...planned.hooked_session import HookedSession
from .wire import StoreWire

__all__ = ["StoreSession"]


class _SummedSource(HookSource):
    """Gradients whose chunks have keys before they are sent."""

    _wire: StoreWire

    def _settle(self, order: Sequence[int]) -> None:
        super()._settle(order)
        # Workers meet for each new key: here, where they wait for each other anyway.
        for bucket in self.buckets:
            for chunk in bucket.chunks:
                self._wire.name(chunk.sent, chunk.key)


class StoreSession(HookedSession):
    """The life of one model whose gradients go to a store; see `HookedSession`."""

    source_kind: ClassVar[type[HookSource]] = _SummedSource
    _wire: StoreWire

    def stats(self) -> dict[str, int | float | str]:
        """See `PlannedSession`."""
        return {**super().stats(), **self._wire.figures()}
