"""A parameter server over MPI, under the name that scripts import."""

from __future__ import annotations

from .stores.mpi.opening import MPIKVStore, open_store

__all__ = ["MPIKVStore", "open_store"]
