"""A parameter server over MPI, under the name that scripts import."""

from __future__ import annotations

from .stores.mpi.opening import open_store
from .stores.mpi.worker import MPIKVStore

__all__ = ["MPIKVStore", "open_store"]
