"""The systems that `bytesched bench` knows, by family: what carries them, and what they need."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from bytesched.errors import ConfigError
from bytesched.lab.mpi import find_mpirun
from bytesched.values import nearest, parse_flag, shown

SYSTEMS = ("ddp", "ddp-best", "fsdp2", "bytesched")
#: not measured unless they are named
FURTHER_SYSTEMS = ("ddp-finalize", "zero1")
HOROVOD_SYSTEMS = ("horovod", "horovod-best", "bytesched-horovod")
#: of a profile with layers of experts: those that are measured unless others are named
EXCHANGE_SYSTEMS = (
    *("ddp", "ddp-own-group", "bytesched-no-lane", "bytesched", "bytesched-pieces", "idle"),
)
#: that experts of bytesched-pieces compute one after the other
EXCHANGE_PIECES = 4
KVSTORE_SYSTEMS = ("kv-plain", "kv-p3", "bytesched-kv")
WITH_OPTIONS = (
    *("ddp", "ddp-finalize", "bytesched", "horovod", "horovod-best", "bytesched-horovod"),
    *("ddp-own-group", "bytesched-no-lane", "bytesched-pieces"),
    *KVSTORE_SYSTEMS,
)
DDP_WITH_OPTIONS = ("ddp", "ddp-own-group", "ddp-finalize")
#: the first torch with `DistributedDataParallel.finalize_backward`
FINALIZES = (2, 15)
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
    known: Sequence[str] = tuple(
        dict.fromkeys(
            (*SYSTEMS, *FURTHER_SYSTEMS, *EXCHANGE_SYSTEMS, *HOROVOD_SYSTEMS, *KVSTORE_SYSTEMS)
        )
    ),
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


def ddp_arguments(options: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `DistributedDataParallel` for the options of a system.

    Raises `ValueError` for a value that cannot be, and `KeyError` for an option that is none.
    """
    found = [(*_DDP_OPTIONS[name], value) for name, value in options.items()]
    return {argument: parse(value) for argument, parse, value in found}


def _megabytes(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e6:
        raise ValueError("not a size in MB, above 0")
    return number


_DDP_OPTIONS: dict[str, tuple[str, Callable[[str], float | bool]]] = {
    "bucket_mb": ("bucket_cap_mb", _megabytes),
    "bucket_view": ("gradient_as_bucket_view", parse_flag),
    "static_graph": ("static_graph", parse_flag),
}


def check_ddp(systems: Sequence[System]) -> None:
    """Raises `ConfigError` if DDP's systems have wrong options, or torch is too old for one."""
    for system in systems:
        if system.kind not in DDP_WITH_OPTIONS:
            continue
        for name, value in system.options.items():
            if name not in _DDP_OPTIONS:
                raise ConfigError(
                    f"--systems: {system.label!r}: {name!r}{nearest(name, _DDP_OPTIONS)}"
                )
            try:
                ddp_arguments({name: value})
            except ValueError as error:
                raise ConfigError(
                    f"--systems: {system.label!r}: {name} = {shown(value)}: {error}"
                ) from None
    if _any_of(systems, ("ddp-finalize",)):
        installed = version("torch")
        numbers = re.match(r"(\d+)\.(\d+)", installed)
        if numbers and tuple(map(int, numbers.groups())) < FINALIZES:
            raise ConfigError(
                f"--systems: ddp-finalize needs torch {'.'.join(map(str, FINALIZES))} or newer, "
                f"and {installed} is installed"
            )


def check_exchanges(systems: Sequence[System], *, has_experts: bool) -> None:
    """Raises `ConfigError` for systems that cannot carry all-to-alls, or have none to carry."""
    for system in systems:
        if has_experts and system.kind not in EXCHANGE_SYSTEMS:
            raise ConfigError(
                f"--systems: {system.label!r} does not carry all-to-alls, which the layers of "
                f"experts of this profile need; {', '.join(EXCHANGE_SYSTEMS)} do"
            )
        if not has_experts and system.kind not in SYSTEMS and system.kind in EXCHANGE_SYSTEMS:
            raise ConfigError(
                f"--systems: {system.label!r} is for layers of experts: --emulate moe"
            )


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
