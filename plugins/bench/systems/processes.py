"""Blocks of `bytesched bench` that need processes of their own: started, waited for and read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from bytesched.bench.specification import Specification
from bytesched.bench.systems import System
from bytesched.errors import PluginError
from bytesched.lab.hosts import die_with_parent
from bytesched.lab.ranks import Place
from bytesched.records import to_json

__all__ = ["Block", "run_block"]

_RANK: Final = "bytesched.plugins.bench.systems.block_rank"
#: Of the rank that starts a process, which must not think it is that rank; and the user's settings.
_NOT_INHERITED: Final = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"),
    *("HOROVOD_CACHE_CAPACITY", "HOROVOD_AUTOTUNE", "HOROVOD_AUTOTUNE_LOG", "HOROVOD_TIMELINE"),
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """What each process of a block gets."""

    specification: Specification
    system: System
    warmup: int
    iterations: int
    world_size: int
    #: for what each rank found
    folder: str


def run_block(
    spec: Specification,
    place: Place,
    system: System,
    warmup: int,
    iterations: int,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """What `train` found on this rank, in a new process that has these variables; collective.

    Where there is an mpirun, rank 0 starts the processes of all ranks, with it. The
    ranks that start them wait meanwhile and use no core.
    """
    folder, rank = Path(place.result).parent, dist.get_rank()
    block = Block(
        specification=spec,
        system=system,
        warmup=warmup,
        iterations=iterations,
        world_size=dist.get_world_size(),
        folder=str(folder),
    )
    dist.barrier()
    if not place.mpirun or rank == 0:
        command = [
            *(*place.mpirun, *die_with_parent(), "env"),
            *(word for name in _NOT_INHERITED for word in ("-u", name)),
            *(f"{name}={value}" for name, value in variables.items()),
            *(sys.executable, "-m", _RANK, to_json(block)),
        ]
        _run(command, system.kind, spec.timeout_s)
    dist.barrier()
    found: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text())
    return found


def _run(command: list[str], kind: str, timeout_s: float) -> None:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise PluginError(
            f"a block of {kind} took more than {timeout_s:g} s: raise --timeout-s"
        ) from None
    if done.returncode:
        raise PluginError(f"{kind} ended with exit code {done.returncode}")
