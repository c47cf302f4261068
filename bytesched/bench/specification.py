"""What is measured: the specification that every rank of a bench gets, as JSON."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from bytesched.bench.arguments import MODELS
from bytesched.bench.profile import Profile, load_profile
from bytesched.bench.systems import (
    EXCHANGE_SYSTEMS,
    HOROVOD_SYSTEMS,
    KVSTORE_SYSTEMS,
    SYSTEMS,
    System,
    check_systems,
    parse_systems,
)
from bytesched.environment import RankView
from bytesched.errors import ConfigError
from bytesched.values import nearest


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every measurement is told, all of it options of the command."""

    systems: tuple[System, ...]
    iterations: int
    rounds: int
    warmup: int
    optimizer: str
    #: largest norm of all gradients; 0: they are not clipped
    clip: float
    #: of torch in each rank; 0: as torch chooses
    threads: int
    #: for one collective
    timeout_s: float


TrainingT = TypeVar("TrainingT", bound=Training)


@dataclass(frozen=True, kw_only=True)
class Specification(Training):
    """What `bytesched bench` measures."""

    #: the model's name, ``module:function``, or the name of the profile
    model: str
    #: that is emulated, if one is
    profile: Profile | None
    #: of each rank; 0: the model's own
    batch: int
    sweep_iterations: int
    #: of Horovod
    controller: str
    #: ranks that serve, 0: all do; None: there is no store
    servers: int | None
    compute_scale: float
    comm_ratio: float | None
    #: batch sizes whose compute profiles are recorded
    record: tuple[int, ...]
    #: on each emulated host
    ranks_per_host: int

    def is_any_of(self, kinds: tuple[str, ...]) -> bool:
        """Whether one of these systems is measured."""
        return any(system.kind in kinds for system in self.systems)


def with_options(kind: type[TrainingT], options: Namespace, **others: Any) -> TrainingT:
    """A specification whose fields are options of the command, and those given here."""
    names = {field.name for field in fields(kind)} - others.keys()
    return kind(**{name: getattr(options, name) for name in names}, **others)


def specification(options: Namespace, view: RankView) -> Specification:
    """What the options ask for. Raises `ConfigError` for what cannot be run."""
    _check_launch(options, view)
    check_outputs(options)
    profile = load_profile(options.emulate) if options.emulate else None
    model = profile.name if profile else options.model or MODELS[0]
    if not (profile or ":" in model or model in MODELS):
        raise ConfigError(f"--model {model!r}{nearest(model, MODELS)}")
    if not profile and (options.comm_ratio or options.compute_scale != 1.0):
        raise ConfigError(
            "--comm-ratio and --compute-scale change emulated compute and need --emulate; "
            "for a real model change --batch"
        )
    several = len(options.batch) > 1
    if options.batch[0] < several:
        raise ConfigError(f"--batch {options.batch[0]}: at least {several:d}")
    if several and not (model in MODELS and not profile and options.record):
        raise ConfigError(
            f"--batch with several sizes is for --record of {', '.join(MODELS)}: systems are "
            "measured with one"
        )
    has_experts = profile is not None and profile.exchanged_bytes > 0
    systems = parse_systems(
        options.systems or ",".join(EXCHANGE_SYSTEMS if has_experts else SYSTEMS)
    )
    check_systems(
        systems,
        launcher=view.launcher,
        has_experts=has_experts,
        controller=options.controller,
        servers=options.servers,
    )
    if has_experts:
        refuse(options, "a profile with layers of experts", "clip", "record")
    through_servers = systems[0].kind in KVSTORE_SYSTEMS
    servers = 1 if options.servers is None else options.servers
    if through_servers:
        refuse(options, ", ".join(KVSTORE_SYSTEMS), "clip")
    spec = with_options(
        Specification,
        options,
        systems=systems,
        model=model,
        profile=profile,
        batch=options.batch[-1],
        controller=options.controller or "gloo",
        servers=servers if through_servers else None,
        record=tuple(options.batch) if options.record else (),
    )
    if spec.ranks_per_host > 1 and spec.is_any_of(HOROVOD_SYSTEMS + KVSTORE_SYSTEMS):
        raise ConfigError("--ranks-per-host is for systems over torch.distributed")
    return spec


def refuse(options: Namespace, what: str, *names: str) -> None:
    """Raises `ConfigError` if one of these options is given, which are not for ``what``."""
    for name in names:
        if getattr(options, name) not in (None, False, 0):
            raise ConfigError(f"--{name.replace('_', '-')} is not for {what}")


def check_outputs(options: Namespace) -> None:
    """Raises `ConfigError` for what could not be measured, drawn or written."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("bench needs torch: pip install 'bytesched[torch]'")
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib: pip install 'bytesched[report]'")
    for name in ("json", "png", "record"):
        path = getattr(options, name)
        if path and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder")


def _check_launch(options: Namespace, view: RankView) -> None:
    for one, other in (("model", "emulate"), ("lab", "workers"), ("comm_ratio", "compute_scale")):
        if getattr(options, one) and getattr(options, other) not in (None, 1.0):
            flags = f"--{one} and --{other}".replace("_", "-")
            raise ConfigError(f"{flags} exclude each other")
    if view.launcher != "none":
        if options.lab or options.workers:
            raise ConfigError(f"--lab and --workers start ranks, and {view.launcher} has done so")
        if view.world_size < 2:
            raise ConfigError(f"{view.launcher} started one rank, which has nothing to send")
    if options.rate and not options.lab:
        raise ConfigError("--rate shapes the links of emulated hosts and needs --lab N")
    if options.ranks_per_host > 1 and not options.lab:
        raise ConfigError("--ranks-per-host is for emulated hosts and needs --lab N")
