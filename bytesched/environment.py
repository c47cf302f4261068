"""What launchers, frameworks and users left in the environment of this process.

The only file of the package that reads the environment or changes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    "HOROVOD_CACHE_CAPACITY",
    "PREFIX",
    "RankView",
    "child_environment",
    "gloo_interfaces",
    "horovod_autotunes",
    "horovod_cache_capacity",
    "horovod_number",
    "horovod_variable",
    "is_horovod_elastic",
    "mxnet_engine",
    "mxnet_hosts",
    "own_variables",
    "rank_view",
    "seen_variables",
    "set_variables",
    "user_cache_folder",
]

PREFIX = "BYTESCHED_"
#: operations that Horovod remembers if nothing else is set
HOROVOD_CACHE_CAPACITY: Final = 1024

_NUMBER: Final = re.compile(r"\s*[+-]?\d+(\.\d*)?")


class RankView(NamedTuple):
    """This process according to its launcher; local_rank is -1 where that is not known."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int


_LAUNCHERS = (
    ("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("slurm", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)
_NETWORK_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TORCH_DISTRIBUTED_DEBUG",
)


def rank_view() -> RankView:
    """Return rank and world size as the launcher put them into the environment.

    Outside any launcher this is rank 0 of a world of one, launcher "none".
    """
    for launcher, *names in _LAUNCHERS:
        rank, local_rank, world_size = (_count(name) for name in names)
        if rank >= 0 and world_size > 0:
            return RankView(launcher, rank, local_rank, world_size)
    return RankView("none", 0, 0, 1)


def _count(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else -1


def seen_variables() -> dict[str, str]:
    """Return the variables that bear on a distributed run and are set, by name."""
    known = {name for _, *names in _LAUNCHERS for name in names} | set(_NETWORK_VARIABLES)
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in known or name.startswith(PREFIX)
    }


def gloo_interfaces() -> list[str]:
    """Return the interfaces that `GLOO_SOCKET_IFNAME` names; none means Gloo's own choice."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return [name.strip() for name in names if name.strip()]


def own_variables() -> dict[str, str]:
    """Return the variables of bytesched that are set, by name."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIX)}


def set_variables(texts: Mapping[str, str]) -> None:
    """Set variables of this process and of its children."""
    os.environ.update(texts)


def child_environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return this process's environment for a child, with changes; None removes a variable."""
    environment = dict(os.environ)
    for name, value in (changes or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def user_cache_folder() -> Path:
    """Return the folder in which programs of this user keep what they can find again."""
    named = os.environ.get("XDG_CACHE_HOME", "").strip()
    return Path(named) if os.path.isabs(named) else Path.home() / ".cache"


def horovod_variable(name: str) -> str:
    """Return what `HOROVOD_<name>` is set to, or nothing."""
    return os.environ.get(f"HOROVOD_{name}", "")


def horovod_number(name: str, default: float) -> float:
    """Return the number in `HOROVOD_<name>`.

    A value is cut off where it stops being a number, and is 0 if it does not begin with one.
    """
    text = horovod_variable(name)
    if not text:
        return default
    found = _NUMBER.match(text)
    return float(found.group()) if found else 0.0


def horovod_cache_capacity() -> int:
    """Return how many operations Horovod remembers from one step to the next."""
    return int(horovod_number("CACHE_CAPACITY", HOROVOD_CACHE_CAPACITY))


def horovod_autotunes() -> bool:
    """Return whether Horovod's own autotuner runs."""
    return horovod_number("AUTOTUNE", 0) > 0


def is_horovod_elastic() -> bool:
    """Return whether Horovod's ranks may come and go."""
    return horovod_number("ELASTIC", 0) > 0


def mxnet_hosts() -> tuple[str, str]:
    """Return the address set for this process of MXNet, or nothing, and that of its scheduler."""
    return os.environ.get("DMLC_NODE_HOST", ""), os.environ.get("DMLC_PS_ROOT_URI", "")


def mxnet_engine() -> str:
    """Return which of its engines MXNet shall use, or nothing."""
    return os.environ.get("MXNET_ENGINE_TYPE", "")
