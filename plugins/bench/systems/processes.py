"""Blocks of `bytesched bench` that need processes of their own: started, and what runs in them.

Ranks of Horovod, or workers and servers of a store over MPI:
``python -m bytesched.plugins.bench.systems.processes SPECIFICATION RANKS FOLDER``
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from bytesched.bench.specification import Specification
from bytesched.errors import PluginError
from bytesched.lab.hosts import die_with_parent
from bytesched.lab.ranks import Place, threads
from bytesched.records import from_json, to_json
from bytesched.values import parse_flag

from ..block import SEED, train
from ..rank import leave_after
from ..workloads.models import Workload, build
from .data_parallel import Running, set_up

#: a workload, the system around it, and this rank
_Ready = tuple[Workload, Running, int]

_RANK: Final = "bytesched.plugins.bench.systems.processes"
#: Of the rank that starts a process, which must not think it is that rank; and the user's settings.
_NOT_INHERITED: Final = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"),
    *("HOROVOD_CACHE_CAPACITY", "HOROVOD_AUTOTUNE", "HOROVOD_AUTOTUNE_LOG", "HOROVOD_TIMELINE"),
)


def run_block(spec: Specification, place: Place, variables: Mapping[str, str]) -> dict[str, Any]:
    """What `train` found on this rank with the one system of ``spec``; collective.

    In a new process that has these variables. Where there is an mpirun, rank 0 starts those of all
    ranks with it. The ranks that start them wait meanwhile and use no core.
    """
    folder, rank = Path(place.result).parent, dist.get_rank()
    dist.barrier()
    if not place.mpirun or rank == 0:
        command = [
            *(*place.mpirun, *die_with_parent(), "env"),
            *(word for name in _NOT_INHERITED for word in ("-u", name)),
            *(f"{name}={value}" for name, value in variables.items()),
            f"OMP_NUM_THREADS={threads()}",
            *(sys.executable, "-m", _RANK, to_json(spec), str(dist.get_world_size()), str(folder)),
        ]
        kind, quiet = spec.systems[0].kind, subprocess.DEVNULL
        try:
            subprocess.run(command, stdin=quiet, timeout=spec.timeout_s, check=True)
        except subprocess.TimeoutExpired:
            raise PluginError(
                f"a block of {kind} took more than {spec.timeout_s:g} s: take fewer --iterations"
            ) from None
        except subprocess.CalledProcessError as error:
            raise PluginError(f"{kind} ended with exit code {error.returncode}") from None
    dist.barrier()
    found: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text())
    return found


def main(argv: list[str]) -> int:
    """Train, and write what `train` found into the folder, a file for each rank."""
    spec, ranks, folder = from_json(Specification, argv[0]), int(argv[1]), Path(argv[2])
    around = _on_horovod(spec, ranks) if spec.servers is None else _on_a_store(spec, spec.servers)
    with around as (workload, running, rank):
        length = spec.warmup, spec.iterations
        found = train(workload, running, *length, lambda step: step * ranks + rank, spec.clip)
        # Of a process that has done nothing else.
        del found["peak_bytes"], found["state_bytes"]
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    return 0


@contextmanager
def _on_horovod(spec: Specification, ranks: int) -> Iterator[_Ready]:
    import horovod.torch as hvd

    if spec.controller == "mpi" and not hvd.mpi_built():
        raise PluginError("the installed Horovod was built without MPI: use --controller gloo")
    hvd.init()
    if hvd.size() != ranks:
        raise PluginError(f"Horovod sees {hvd.size()} ranks, {ranks} were started")
    [system], workload = spec.systems, build(spec, SEED)
    running = set_up(system.kind, system.options, workload.model)
    hvd.barrier()
    yield workload, running, hvd.rank()
    hvd.shutdown()


@contextmanager
def _on_a_store(spec: Specification, servers: int) -> Iterator[_Ready]:
    from ...stores.mpi.opening import open_store
    from .servers import set_up_store

    [system] = spec.systems
    options = dict(system.options)
    # A rank that serves ends in here.
    store = open_store(
        servers=servers,
        transfer=options.pop("transfer", "two-sided"),
        updates=parse_flag(options.pop("updates", "0")),
        timeout_s=spec.timeout_s,
    )
    workload = build(spec, SEED)
    running = set_up_store(system.kind, options, workload.model, spec, store)
    store.barrier()
    yield workload, running, store.rank
    store.close()


if __name__ == "__main__":
    if from_json(Specification, sys.argv[1]).servers is None:
        leave_after(main)
    # MPI is to be told at the end of the interpreter.
    raise SystemExit(main(sys.argv[1:]))
