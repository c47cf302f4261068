"""What a worker asks of the servers: the calls of a store."""

from __future__ import annotations

from bytesched.plugins.mpi_kvstore.worker.store import MPIKVStore

__all__ = ["MPIKVStore"]
