"""The configuration: one frozen `Config`, taken from code, environment, file and defaults.

A value comes from the first place that names it: an argument in the code, a `BYTESCHED_<FIELD>`
variable (the command line sets those), `bytesched.toml` in the working directory, the default.
This is the only file of the package that reads the process environment.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypedDict

from bytesched.errors import ConfigError
from bytesched.values import (
    AUTOMATIC,
    nearest,
    one_of,
    parse_flag,
    parse_name,
    parse_optional_flag,
    parse_path,
    parse_size,
    parse_text,
    parse_timeout,
    whole_number,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "BYTESCHED_"
FILE_NAME = "bytesched.toml"
#: below, there would be no time to compare what was found with the untuned setting
LEAST_TUNE_STEPS = 40

_COMMAND_LINE = "command line"

_log = logging.getLogger("bytesched")

#: fields that were set on the command line of this process
_on_command_line: set[str] = set()


class ConfigFields(TypedDict, total=False):
    """The fields of `Config` as keyword arguments, in the forms that users write."""

    enabled: bool
    policy: str
    partition_bytes: int | str
    credit_bytes: int | str
    order: str
    compression: str
    cross_barrier: bool
    find_unused_parameters: bool | None
    timeout_s: float
    timeline: str
    tune: bool
    tune_steps: int
    tune_space: str
    tune_file: str
    log_level: str


@dataclass(frozen=True)
class Config:
    """What a user can set. Values are checked and brought to their type on construction."""

    enabled: bool = True
    """False: `wrap` returns the optimizer untouched."""
    policy: str = "priority"
    """Name of the policy that decides which ready task goes first."""
    partition_bytes: int = AUTOMATIC
    """Largest piece sent at once; 0 chooses it from the measured link."""
    credit_bytes: int = AUTOMATIC
    """Most bytes in flight at a time; 0 chooses it together with the partition."""
    order: str = "auto"
    """How the ranks agree on one order: leader, replay or auto."""
    compression: str = "none"
    """Wire format: none, bf16 or fp16."""
    cross_barrier: bool = True
    """False: schedule inside the backward pass and update the whole model in `step()`."""
    find_unused_parameters: bool | None = None
    """Whether parameters may stay out of the loss; None: as DDP says, or learned at once."""
    timeout_s: float = 1800.0
    """Longest time that anything waits before it raises."""
    timeline: str = ""
    """Folder that receives `rank<n>.trace.json`; empty: no trace."""
    tune: bool = False
    """Whether to look for the fastest sizes while training, and to remember them."""
    tune_steps: int = 150
    """Most steps that looking for them may take."""
    tune_space: str = ""
    """Where to look, such as "partition_bytes=64KiB..4MiB"; empty: around what the link wants."""
    tune_file: str = ""
    """File that remembers what was found; empty: one per cluster, in the user's cache folder."""
    log_level: str = "INFO"
    """Level of the logger `bytesched`."""

    _origins: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for name in FIELDS:
            object.__setattr__(self, name, _checked(name, getattr(self, name)))
        if AUTOMATIC < self.credit_bytes < self.partition_bytes:
            raise ConfigError(
                f"credit_bytes = {self.credit_bytes} is below partition_bytes = "
                f"{self.partition_bytes}, so no full partition could ever be sent: raise "
                f"credit_bytes to at least {self.partition_bytes}, or lower partition_bytes"
            )

    @classmethod
    def load(cls, **fields: object) -> Config:
        """Return the configuration in force, each value from the first place that names it.

        Raises `ConfigError` for an unknown name or an impossible value, and says where it stood.
        """
        layers: tuple[tuple[Callable[[str], str], Mapping[str, object]], ...] = (
            (lambda _: f"file {FILE_NAME}", _from_file(Path(FILE_NAME))),
            (_origin_of_variable, _from_environment()),
            (lambda _: "code", fields),
        )
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        hidden: list[str] = []
        for origin_of, layer in layers:
            for name, raw in layer.items():
                origin = origin_of(name)
                value = _checked(name, raw, origin)
                if origin == "code" and values.get(name, value) != value:
                    hidden.append(f"{name} = {value!r} hides {values[name]!r} ({origins[name]})")
                values[name], origins[name] = value, origin
        config = cls(**values)
        object.__setattr__(config, "_origins", origins)
        if rank_view().rank == 0:
            for complaint in unread_variables():
                _log.warning("%s", complaint)
            if hidden:
                _log.info("an argument in the code comes first: %s", "; ".join(hidden))
        return config

    def explain(self) -> list[tuple[str, object, str]]:
        """Return (field, value, origin) for every field, in the order of definition."""
        return [(name, getattr(self, name), self._origin(name)) for name in FIELDS]

    def _origin(self, name: str) -> str:
        is_default = getattr(self, name) == FIELDS[name].default
        return self._origins.get(name, "default" if is_default else "code")


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


class RankView(NamedTuple):
    """What the launcher says about this process; local_rank is -1 where it does not tell."""

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


def horovod_variable(name: str) -> str:
    """Return what `HOROVOD_<name>` is set to, or nothing."""
    return os.environ.get(f"HOROVOD_{name}", "")


def mxnet_servers() -> int:
    """Return how many servers a worker of MXNet's parameter server was told of, at least 1."""
    return max(_count("DMLC_NUM_SERVER"), 1)


def mxnet_hosts() -> tuple[str, str]:
    """Return the address that MXNet was told to have, or nothing, and that of its scheduler."""
    return os.environ.get("DMLC_NODE_HOST", ""), os.environ.get("DMLC_PS_ROOT_URI", "")


def mxnet_engine() -> str:
    """Return which of its engines MXNet was told to use, or nothing."""
    return os.environ.get("MXNET_ENGINE_TYPE", "")


def unread_variables() -> list[str]:
    """Return a sentence for each `BYTESCHED_` variable that sets no field."""
    known = [variable(name) for name in FIELDS]
    return [
        f"{name} is set, but nothing reads it{nearest(name, known)}"
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    ]


def child_environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return this process's environment for a child, with changes; None removes a variable."""
    environment = dict(os.environ)
    for name, value in (changes or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def set_on_command_line(texts: Mapping[str, str]) -> None:
    """Give fields a value that comes before environment and file, also in child processes.

    Raises `ConfigError` for an unknown name or an impossible value, and sets nothing then.
    """
    for name, text in texts.items():
        _checked(name, text, _COMMAND_LINE)
    for name, text in texts.items():
        os.environ[variable(name)] = text
    _on_command_line.update(texts)


def variable(name: str) -> str:
    """Return the environment variable that sets a field."""
    return PREFIX + name.upper()


_PARSERS: dict[str, Callable[[object], object]] = {
    "enabled": parse_flag,
    "policy": parse_name,
    "partition_bytes": parse_size,
    "credit_bytes": parse_size,
    "order": one_of("auto", "leader", "replay"),
    "compression": one_of("none", "bf16", "fp16"),
    "cross_barrier": parse_flag,
    "find_unused_parameters": parse_optional_flag,
    "timeout_s": parse_timeout,
    "timeline": parse_path,
    "tune": parse_flag,
    "tune_steps": whole_number(LEAST_TUNE_STEPS, 10**6),
    "tune_space": parse_text,
    "tune_file": parse_path,
    "log_level": one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
}


def _checked(name: str, value: object, origin: str = "code") -> object:
    if name not in FIELDS:
        raise ConfigError(f"there is no field {name!r} ({origin}){nearest(name, FIELDS)}")
    try:
        return _PARSERS[name](value)
    except ValueError as error:
        raise ConfigError(f"{name} = {value!r} ({origin}): {error}") from None


def _origin_of_variable(name: str) -> str:
    return _COMMAND_LINE if name in _on_command_line else f"environment {variable(name)}"


def _from_environment() -> dict[str, object]:
    return {name: os.environ[variable(name)] for name in FIELDS if variable(name) in os.environ}


def _from_file(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        return dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from error
