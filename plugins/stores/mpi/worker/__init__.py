"""What a worker asks of the servers: the calls of a store."""

from __future__ import annotations

from .store import MPIKVStore

__all__ = ["MPIKVStore"]
