"""Parameter servers in `bytesched bench`: a block of workers and servers that mpirun starts.

MPI starts once in a process, and servers are ranks of its job. So every block has processes of
its own, as Horovod's have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bytesched.plugins.bench.systems.processes import OwnProcesses

__all__ = ["KVStoreBlocks"]

RANK = "bytesched.plugins.bench.systems.kvstore_rank"


class KVStoreBlocks:
    """Runs blocks of workers and servers; every rank of the bench makes the same calls.

    Args:
        spec: the bench specification of this rank.
        content: the model, as `build` wants it.
    """

    def __init__(self, spec: Mapping[str, Any], content: object) -> None:
        self._facts = {"servers": spec["servers"], "timeout_s": spec["timeout_s"]}
        self._processes = OwnProcesses(RANK, spec, content, by_mpi=True)

    def block(self, system: Mapping[str, Any], warmup: int, iterations: int) -> dict[str, Any]:
        """What `train` found on this worker."""
        return self._processes.block(
            system["kind"], system["options"], warmup, iterations, variables={}, facts=self._facts
        )
