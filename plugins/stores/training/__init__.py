"""A torch model trained through a store: gradients summed there, or parameters updated there."""

from __future__ import annotations

from .store_backend import StoreBackend
from .store_session import StoreSession

__all__ = ["StoreBackend", "StoreSession"]
