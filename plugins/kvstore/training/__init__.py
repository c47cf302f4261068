"""A torch model trained through a store: gradients summed there, or parameters updated there."""

from __future__ import annotations

from bytesched.plugins.kvstore.training.backend import StoreBackend
from bytesched.plugins.kvstore.training.store_session import StoreSession

__all__ = ["StoreBackend", "StoreSession"]
