"""Any store, its pushes and pulls in the order of urgency. `training` trains a model through it."""

from __future__ import annotations

from bytesched.plugins.kvstore.scheduled import ScheduledKVStore

__all__ = ["ScheduledKVStore"]
