"""Blocks of `bytesched bench` that need processes of their own: started, and what runs in them.

Ranks of Horovod, or workers and servers of a store over MPI:
``python -m bytesched.plugins.bench.systems.processes BLOCK``
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from bytesched.bench.specification import Specification
from bytesched.bench.systems import System
from bytesched.errors import PluginError
from bytesched.lab.hosts import die_with_parent
from bytesched.lab.ranks import Place
from bytesched.records import from_json, to_json
from bytesched.values import parse_flag

from ..block import SEED, train
from ..rank import leave_after
from ..workloads.models import Workload, build
from .data_parallel import Running, set_up

_RANK: Final = "bytesched.plugins.bench.systems.processes"
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


def main(argv: list[str]) -> int:
    """Train, and write what `train` found into the block's folder, a file for each rank."""
    block = from_json(Block, argv[0])
    spec = block.specification
    if spec.threads:
        torch.set_num_threads(spec.threads)
    train_here = _train_on_horovod if spec.servers is None else _train_on_a_store
    train_here(block)
    return 0


def _train_on_horovod(block: Block) -> None:
    import horovod.torch as hvd

    spec = block.specification
    if spec.controller == "mpi" and not hvd.mpi_built():
        raise PluginError("the installed Horovod was built without MPI: use --controller gloo")
    hvd.init()
    if hvd.size() != block.world_size:
        raise PluginError(f"Horovod sees {hvd.size()} ranks, {block.world_size} were started")
    workload = build(spec, SEED)
    running = set_up(block.system.kind, block.system.options, workload.model, spec.optimizer)
    hvd.barrier()
    _train(block, workload, running, hvd.rank(), local_size=hvd.local_size())
    hvd.shutdown()


def _train_on_a_store(block: Block) -> None:
    from ...stores.mpi.opening import open_store
    from .servers import set_up_store

    spec, options = block.specification, dict(block.system.options)
    assert spec.servers is not None, "a block of a store has a store"
    # A rank that serves ends in here.
    store = open_store(
        servers=spec.servers,
        transfer=options.pop("transfer", "two-sided"),
        updates=parse_flag(options.pop("updates", "0")),
        timeout_s=spec.timeout_s,
    )
    workload = build(spec, SEED)
    system = block.system.kind, options, workload.model, spec.optimizer
    running = set_up_store(*system, store, servers=spec.servers, timeout_s=spec.timeout_s)
    store.barrier()
    _train(block, workload, running, store.rank)
    store.close()


def _train(block: Block, workload: Workload, running: Running, rank: int, **more: int) -> None:

    def seed_of(step: int) -> int:
        return step * block.world_size + rank

    clip = block.specification.clip
    found = train(workload, running, block.warmup, block.iterations, seed_of, clip)
    # Of a process that has done nothing else.
    del found["peak_bytes"], found["state_bytes"]
    Path(block.folder, f"rank{rank}.json").write_text(json.dumps(found | more))


if __name__ == "__main__":
    if from_json(Block, sys.argv[1]).specification.servers is None:
        leave_after(main)
    # MPI is to be told at the end of the interpreter.
    raise SystemExit(main(sys.argv[1:]))
