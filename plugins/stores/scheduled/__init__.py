"""Any store, its pushes and pulls in the order of urgency. `training` trains a model through it."""

from __future__ import annotations

from .store import ScheduledKVStore

__all__ = ["ScheduledKVStore"]
