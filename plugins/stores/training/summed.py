"""A session whose gradients a store sums."""

from __future__ import annotations

from ...planned.hooked_session import HookedSession
from .wire import StoreWire

__all__ = ["StoreSession"]


class StoreSession(HookedSession):
    """The life of one model whose gradients go to a store; see `HookedSession`."""

    _wire: StoreWire

    def stats(self) -> dict[str, int | float | str]:
        """See `PlannedSession`."""
        return {**super().stats(), **self._wire.figures()}
