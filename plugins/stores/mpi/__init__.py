"""A parameter server over MPI: open_store, workers, servers."""

from __future__ import annotations

from .opening import MPIKVStore, open_store

__all__ = ["MPIKVStore", "open_store"]
