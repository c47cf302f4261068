"""Blocks of `bytesched bench` that need processes of their own: started, waited for and read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bytesched.errors import PluginError
from bytesched.lab.hosts import die_with_parent

__all__ = ["NOT_INHERITED", "OwnProcesses"]

#: Variables of the rank that starts a process, which must not think it is that rank.
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


class OwnProcesses:
    """Runs blocks in new processes; every rank of the bench makes the same calls.

    The ranks that start them wait meanwhile and use no core.

    Args:
        module: what each process runs, with the block as JSON for its only argument. Rank r of
            it writes what `train` found into ``rank<r>.json``, in the folder of the block.
        spec: the bench specification of this rank.
        content: the model, as `build` wants it.
        by_mpi: rank 0 starts the processes of all ranks, with the specification's mpirun; else
            every rank starts its own.
        unset: further variables that they do not inherit.
    """

    def __init__(
        self,
        module: str,
        spec: Mapping[str, Any],
        content: object,
        *,
        by_mpi: bool,
        unset: Sequence[str] = (),
    ) -> None:
        self._module = module
        self._spec = spec
        self._content = content
        self._by_mpi = by_mpi
        self._unset = (*NOT_INHERITED, *unset)
        self.folder = Path(spec["result"]).parent
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def block(
        self,
        kind: str,
        options: Mapping[str, str],
        warmup: int,
        iterations: int,
        *,
        variables: Mapping[str, str],
        facts: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What `train` found on this rank; ``facts`` are told to each process as well."""
        request = {name: self._spec[name] for name in ("kind", "batch", "optimizer", "threads")} | {
            "content": self._content,
            "world_size": self.world_size,
            "system": kind,
            "options": dict(options),
            "warmup": warmup,
            "iterations": iterations,
            "folder": str(self.folder),
            **facts,
        }
        dist.barrier()
        if not self._by_mpi or self.rank == 0:
            self._run(variables, request)
        dist.barrier()
        found: dict[str, Any] = json.loads((self.folder / f"rank{self.rank}.json").read_text())
        return found

    def _run(self, variables: Mapping[str, str], request: Mapping[str, Any]) -> None:
        command = [
            *(self._spec["mpirun"] if self._by_mpi else []),
            *die_with_parent(),
            "env",
            *(word for name in self._unset for word in ("-u", name)),
            *(f"{name}={value}" for name, value in variables.items()),
            *(sys.executable, "-m", self._module, json.dumps(request)),
        ]
        timeout_s = self._spec["timeout_s"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise PluginError(
                f"a block of {request['system']} took more than {timeout_s:g} s: raise --timeout-s"
            ) from None
        if done.returncode:
            raise PluginError(f"{request['system']} ended with exit code {done.returncode}")
