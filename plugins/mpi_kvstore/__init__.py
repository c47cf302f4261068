"""A parameter server over MPI: open_store, workers, servers."""

from __future__ import annotations

from bytesched.plugins.mpi_kvstore.opening import MPIKVStore, open_store

__all__ = ["MPIKVStore", "open_store"]
