"""Blocks of `bytesched bench` that need processes of their own: started, waited for and read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bytesched.bench.specification import Specification
from bytesched.bench.systems import System
from bytesched.errors import PluginError
from bytesched.lab.hosts import die_with_parent
from bytesched.lab.ranks import Place
from bytesched.records import to_json

__all__ = ["NOT_INHERITED", "Block", "OwnProcesses"]

#: Variables of the rank that starts a process, which must not think it is that rank.
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class Block:
    """What each process of a block gets."""

    specification: Specification
    #: the model, as `build` wants it
    content: object
    system: System
    warmup: int
    iterations: int
    world_size: int
    #: for what each rank found
    folder: str


class OwnProcesses:
    """Runs blocks in new processes; every rank of the bench makes the same calls.

    The ranks that start them wait meanwhile and use no core.

    Args:
        module: what each process runs, with the block as JSON for its only argument. Rank r of
            it writes what `train` found into ``rank<r>.json``, in the folder of the block.
        place: where this rank of the bench runs.
        content: the model, as `build` wants it.
        by_mpi: rank 0 starts the processes of all ranks, with the mpirun of its place; else
            every rank starts its own.
        unset: further variables that they do not inherit.
    """

    def __init__(
        self,
        module: str,
        spec: Specification,
        place: Place,
        content: object,
        *,
        by_mpi: bool,
        unset: Sequence[str] = (),
    ) -> None:
        self._module = module
        self._spec = spec
        self._mpirun = place.mpirun
        self._content = content
        self._by_mpi = by_mpi
        self._unset = (*NOT_INHERITED, *unset)
        self._folder = Path(place.result).parent
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def block(
        self,
        system: System,
        warmup: int,
        iterations: int,
        variables: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """What `train` found on this rank."""
        block = Block(
            specification=self._spec,
            content=self._content,
            system=system,
            warmup=warmup,
            iterations=iterations,
            world_size=self.world_size,
            folder=str(self._folder),
        )
        dist.barrier()
        if not self._by_mpi or self.rank == 0:
            self._run(variables or {}, block)
        dist.barrier()
        found: dict[str, Any] = json.loads((self._folder / f"rank{self.rank}.json").read_text())
        return found

    def _run(self, variables: Mapping[str, str], block: Block) -> None:
        command = [
            *(self._mpirun if self._by_mpi else ()),
            *die_with_parent(),
            "env",
            *(word for name in self._unset for word in ("-u", name)),
            *(f"{name}={value}" for name, value in variables.items()),
            *(sys.executable, "-m", self._module, to_json(block)),
        ]
        timeout_s = self._spec.timeout_s
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise PluginError(
                f"a block of {block.system.kind} took more than {timeout_s:g} s: raise --timeout-s"
            ) from None
        if done.returncode:
            raise PluginError(f"{block.system.kind} ended with exit code {done.returncode}")
