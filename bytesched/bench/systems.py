"""The systems that `bytesched bench` knows: what each may be told, and what it needs."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from bytesched.errors import ConfigError
from bytesched.lab.ranks import find_mpirun
from bytesched.values import nearest, one_of, parse_flag, parse_path, shown, whole_number

SYSTEMS = ("ddp", "ddp-best", "fsdp2", "bytesched")
HOROVOD_SYSTEMS = ("horovod", "bytesched-horovod")
KVSTORE_SYSTEMS = ("kv-plain", "kv-p3", "bytesched-kv")
#: of a profile with layers of experts: those that are measured unless others are named
EXCHANGE_SYSTEMS = (
    *("ddp", "ddp-own-group", "bytesched-no-lane", "bytesched", "bytesched-pieces", "idle"),
)
#: of ranks that share a GPU
GPU_KINDS = ("ddp", "fsdp2", "bytesched")
GPU_SYSTEMS = ("ddp:bucket_mb=4", "ddp:bucket_mb=25", "ddp:bucket_mb=100", "fsdp2", "bytesched")
#: that experts of bytesched-pieces compute one after the other
EXCHANGE_PIECES = 4
#: the first torch with `DistributedDataParallel.finalize_backward`
FINALIZES = (2, 15)

Parsers = Mapping[str, Callable[[str], object]]


def _above_0(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e6:
        raise ValueError("expected a number above 0 and below 1000000")
    return number


#: of DDP: the arguments that they stand for
_DDP = {
    "bucket_mb": "bucket_cap_mb",
    "bucket_view": "gradient_as_bucket_view",
    "static_graph": "static_graph",
}
_OF_DDP: Parsers = {**dict.fromkeys(_DDP, parse_flag), "bucket_mb": _above_0}
_OF_STORES: Parsers = {"transfer": one_of("two-sided", "one-sided"), "updates": parse_flag}
_SLICES: Parsers = {"slice": whole_number(1, 1 << 40), "window": whole_number(1, 1 << 20)}
#: how each option of a system is read; None: what bytesched is told, which ranks read
_OPTIONS: dict[str, Parsers | None] = {
    "ddp": {**_OF_DDP, "timeline": parse_path},
    "ddp-best": {},
    "fsdp2": {},
    "bytesched": None,
    "ddp-finalize": _OF_DDP,
    "zero1": {},
    "ddp-own-group": _OF_DDP,
    "bytesched-no-lane": None,
    "bytesched-pieces": None,
    "idle": {},
    "horovod": {"fusion_mb": _above_0, "cycle_ms": _above_0, "cache": parse_flag},
    "bytesched-horovod": None,
    "kv-plain": _OF_STORES,
    "kv-p3": {**_OF_STORES, **_SLICES},
    "bytesched-kv": None,
}
KINDS = tuple(_OPTIONS)
_GONE = {"horovod-best": "measure horovod with several settings, horovod:fusion_mb=4+cycle_ms=1"}


@dataclass(frozen=True, slots=True)
class System:
    """One of the systems that are measured."""

    label: str
    kind: str
    #: as the command line has them
    options: dict[str, str]


def parse_systems(
    text: str, known: Sequence[str] = KINDS, with_options: Collection[str] = _OPTIONS
) -> tuple[System, ...]:
    """The systems of a list such as ``ddp,bytesched:policy=fifo+credit_bytes=1MiB``."""
    systems: dict[str, System] = {}
    for label in filter(None, (part.strip() for part in text.split(","))):
        kind, _, tail = label.partition(":")
        if kind in _GONE:
            raise ConfigError(f"--systems: {kind} is gone: {_GONE[kind]}")
        if kind not in known:
            raise ConfigError(f"--systems: {kind!r}{nearest(kind, known)}")
        pairs = [pair.partition("=") for pair in filter(None, tail.split("+"))]
        if not all(name and value for name, _, value in pairs):
            raise ConfigError(f"--systems: {label!r}: options are name=value, joined by +")
        parsers = _OPTIONS[kind]
        if pairs and (parsers == {} or kind not in with_options):
            raise ConfigError(f"--systems: {label!r}: {kind} has no options")
        if label in systems:
            raise ConfigError(f"--systems: {label!r} is there twice")
        systems[label] = System(label, kind, {name: value for name, _, value in pairs})
        for name, value in systems[label].options.items() if parsers else ():
            check_option(label, name, value, parsers or {})
    if not systems:
        raise ConfigError(f"--systems: none given; known: {', '.join(known)}")
    return tuple(systems.values())


def check_option(label: str, name: str, value: str, parsers: Parsers) -> None:
    """Raises `ConfigError` unless one of ``parsers`` takes the option of the system ``label``."""
    if name not in parsers:
        raise ConfigError(f"--systems: {label!r}: {name!r}{nearest(name, parsers)}")
    try:
        parsers[name](value)
    except ValueError as error:
        raise ConfigError(f"--systems: {label!r}: {name} = {shown(value)}: {error}") from None


def ddp_arguments(options: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `DistributedDataParallel` for the options of a system."""
    return {_DDP[name]: _OF_DDP[name](value) for name, value in options.items() if name in _DDP}


def check_systems(
    systems: Sequence[System],
    *,
    launcher: str,
    has_experts: bool = False,
    controller: str | None = None,
    servers: int | None = None,
) -> None:
    """Raises `ConfigError` for systems that cannot be measured here, together or on such a model.

    Also for ``--controller`` and ``--servers`` without the systems that they are for.
    """
    labels = {system.kind: system.label for system in systems}
    for kind, label in labels.items():
        if has_experts and kind not in EXCHANGE_SYSTEMS:
            raise ConfigError(
                f"--systems: {label!r} does not carry all-to-alls, which the layers of experts of "
                f"this profile need; {', '.join(EXCHANGE_SYSTEMS)} do"
            )
        if not has_experts and kind in set(EXCHANGE_SYSTEMS) - set(SYSTEMS):
            raise ConfigError(f"--systems: {label!r} is for layers of experts: --emulate moe")
    if "ddp-finalize" in labels:
        installed = version("torch")
        numbers = re.match(r"(\d+)\.(\d+)", installed)
        if numbers and tuple(map(int, numbers.groups())) < FINALIZES:
            raise ConfigError(
                f"--systems: ddp-finalize needs torch {'.'.join(map(str, FINALIZES))} or newer, "
                f"and {installed} is installed"
            )
    by_mpi = controller == "mpi"
    for kinds, flag, given, package, extra in (
        (HOROVOD_SYSTEMS, "--controller", controller, "Horovod", "horovod"),
        (KVSTORE_SYSTEMS, "--servers", servers, "mpi4py", "mpi"),
    ):
        others = labels.keys() - set(kinds)
        if others == labels.keys():
            if given is not None:
                raise ConfigError(f"{flag} is for {', '.join(kinds)}: name one")
            continue
        if kinds == KVSTORE_SYSTEMS:
            by_mpi = True
            if others:
                # The links carry other bytes than those of an all-reduce, and T* is another.
                raise ConfigError(
                    f"--systems: {labels[min(others)]} sends without a server: measure "
                    f"{', '.join(kinds)} in a run of their own"
                )
        if importlib.util.find_spec(package.lower()) is None:
            raise ConfigError(f"these systems need {package}: pip install 'bytesched[{extra}]'")
    if by_mpi:
        if launcher != "none":
            raise ConfigError(
                f"MPI starts ranks with mpirun, and {launcher} has started these: run it alone, "
                "without a launcher"
            )
        find_mpirun()
