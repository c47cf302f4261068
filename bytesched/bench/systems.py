"""The systems that `bytesched bench` knows, by family: what carries them, and what they need."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from bytesched.errors import ConfigError
from bytesched.lab.mpi import find_mpirun
from bytesched.values import nearest

SYSTEMS = ("ddp", "ddp-best", "fsdp2", "bytesched")
#: not measured unless they are named
FURTHER_SYSTEMS = ("zero1", "deepspeed")
HOROVOD_SYSTEMS = ("horovod", "horovod-best", "horovod-autotune", "bytesched-horovod")
KVSTORE_SYSTEMS = ("kv-plain", "kv-p3", "bytesched-kv")
WITH_OPTIONS = (
    *("ddp", "bytesched", "horovod", "horovod-best", "bytesched-horovod"),
    *KVSTORE_SYSTEMS,
)
#: what is swept unless it is given
SWEPT = ("fusion_mb", "cycle_ms")


@dataclass(frozen=True, slots=True)
class System:
    """One of the systems that are measured."""

    label: str
    kind: str
    #: as the command line has them
    options: dict[str, str]


def parse_systems(
    text: str,
    known: Sequence[str] = (*SYSTEMS, *FURTHER_SYSTEMS, *HOROVOD_SYSTEMS, *KVSTORE_SYSTEMS),
    with_options: Sequence[str] = WITH_OPTIONS,
) -> tuple[System, ...]:
    """The systems of a list such as ``ddp,bytesched:policy=fifo+credit_bytes=1MiB``."""
    systems: list[System] = []
    for label in filter(None, (part.strip() for part in text.split(","))):
        kind, _, tail = label.partition(":")
        if kind not in known:
            raise ConfigError(f"--systems: {kind!r}{nearest(kind, known)}")
        pairs = [pair.partition("=") for pair in filter(None, tail.split("+"))]
        if not all(name and value for name, _, value in pairs):
            raise ConfigError(f"--systems: {label!r}: options are name=value, joined by +")
        if pairs and kind not in with_options:
            raise ConfigError(f"--systems: {label!r}: {kind} has no options")
        if kind == "horovod-best" and (other := {name for name, *_ in pairs} - set(SWEPT)):
            raise ConfigError(
                f"--systems: {label!r}: {kind} sweeps {' and '.join(SWEPT)}, or takes them as "
                f"options; {min(other)} is neither"
            )
        if label in {system.label for system in systems}:
            raise ConfigError(f"--systems: {label!r} is there twice")
        systems.append(System(label, kind, {name: value for name, _, value in pairs}))
    if not systems:
        raise ConfigError(f"--systems: none given; known: {', '.join(known)}")
    return tuple(systems)


def check_horovod(systems: Sequence[System], controller: str | None, launcher: str) -> None:
    """Raises `ConfigError` if Horovod's systems, or ``--controller`` without them, cannot be."""
    if not _any_of(systems, HOROVOD_SYSTEMS):
        if controller:
            raise ConfigError(f"--controller is for {', '.join(HOROVOD_SYSTEMS)}: name one")
        return
    if importlib.util.find_spec("horovod") is None:
        raise ConfigError("these systems need Horovod: pip install 'bytesched[horovod]'")
    if controller == "mpi":
        _check_mpi("--controller mpi", launcher)


def check_kvstore(systems: Sequence[System], servers: int | None, launcher: str) -> None:
    """The same for those that send through servers, and ``--servers``.

    They stand alone: the links carry other bytes than those of an all-reduce, and T* is another.
    """
    if not _any_of(systems, KVSTORE_SYSTEMS):
        if servers is not None:
            raise ConfigError(f"--servers is for {', '.join(KVSTORE_SYSTEMS)}: name one")
        return
    if others := [system.label for system in systems if system.kind not in KVSTORE_SYSTEMS]:
        raise ConfigError(
            f"--systems: {others[0]} sends without a server: measure "
            f"{', '.join(KVSTORE_SYSTEMS)} in a run of their own"
        )
    if servers is not None and not 0 <= servers <= 32:
        raise ConfigError(f"--servers {servers}: from 0 (every rank also serves) to 32")
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError("these systems need mpi4py: pip install 'bytesched[mpi]'")
    _check_mpi("a store over MPI", launcher)


def _any_of(systems: Sequence[System], kinds: Sequence[str]) -> bool:
    return any(system.kind in kinds for system in systems)


def _check_mpi(what: str, launcher: str) -> None:
    if launcher != "none":
        raise ConfigError(
            f"{what} starts ranks with mpirun, and {launcher} has started these: run it alone, "
            "with --lab or --workers"
        )
    find_mpirun()
