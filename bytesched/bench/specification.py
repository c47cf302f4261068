"""What is measured: the specification that every rank of a bench gets, as JSON."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bytesched.bench.profile import load_profile, parse_profile
from bytesched.bench.systems import (
    EXCHANGE_SYSTEMS,
    HOROVOD_SYSTEMS,
    KVSTORE_SYSTEMS,
    SYSTEMS,
    System,
    check_ddp,
    check_exchanges,
    check_horovod,
    check_kvstore,
    parse_systems,
)
from bytesched.environment import RankView
from bytesched.errors import ConfigError
from bytesched.values import nearest

__all__ = [
    "DEFAULT_CONTROLLER",
    "MODELS",
    "OPTIMIZERS",
    "Specification",
    "specification",
]

MODELS = ("gpt", "vgg", "resnet")
OPTIMIZERS = ("adamw", "sgd")
DEFAULT_CONTROLLER = "gloo"
DEFAULT_SERVERS = 1


@dataclass(frozen=True, kw_only=True)
class Specification:
    """What `bytesched bench` measures."""

    systems: tuple[System, ...]
    #: "model", "user" (module:function) or "emulate"
    kind: str
    #: the model's name, or the profile that is emulated
    content: object
    #: of each rank; 0: the model's own
    batch: int
    iterations: int
    rounds: int
    warmup: int
    sweep_iterations: int
    #: of Horovod
    controller: str
    #: ranks that serve, 0: all do; None: there is no store
    servers: int | None
    optimizer: str
    #: largest norm of all gradients; 0: they are not clipped
    clip: float
    compute_scale: float
    comm_ratio: float | None
    #: batch sizes whose compute profiles are recorded
    record: tuple[int, ...]
    #: of torch in each rank; 0: as torch chooses
    threads: int
    #: on each emulated host
    ranks_per_host: int
    #: for one collective
    timeout_s: float


def specification(options: Namespace, view: RankView) -> Specification:
    """What the options ask for. Raises `ConfigError` for what cannot be run."""
    _check_launch(options, view)
    _check_numbers(options)
    _check_outputs(options)
    kind, content = "model", options.model
    if options.emulate:
        kind, content = "emulate", load_profile(options.emulate).to_json()
    elif ":" in options.model:
        kind = "user"
    elif options.model not in MODELS:
        raise ConfigError(f"--model {options.model!r}{nearest(options.model, MODELS)}")
    if kind != "emulate" and (options.comm_ratio or options.compute_scale != 1.0):
        raise ConfigError(
            "--comm-ratio and --compute-scale change emulated compute and need --emulate; "
            "for a real model change --batch"
        )
    _check_batches(options.batch, kind, recorded=bool(options.record))
    has_experts = kind == "emulate" and _has_experts(content)
    systems = parse_systems(
        options.systems or ",".join(EXCHANGE_SYSTEMS if has_experts else SYSTEMS)
    )
    check_ddp(systems)
    check_exchanges(systems, has_experts=has_experts)
    for name in ("clip", "record"):
        if has_experts and getattr(options, name):
            raise ConfigError(f"--{name} is not for a profile with layers of experts")
    check_horovod(systems, options.controller, view.launcher)
    check_kvstore(systems, options.servers, view.launcher)
    if options.clip and any(system.kind in KVSTORE_SYSTEMS for system in systems):
        raise ConfigError(f"--clip is not for {', '.join(KVSTORE_SYSTEMS)}")
    own = {*HOROVOD_SYSTEMS, *KVSTORE_SYSTEMS}
    if options.ranks_per_host > 1 and any(system.kind in own for system in systems):
        raise ConfigError("--ranks-per-host is for systems over torch.distributed")
    servers = None
    if systems[0].kind in KVSTORE_SYSTEMS:
        servers = DEFAULT_SERVERS if options.servers is None else options.servers
    return Specification(
        systems=systems,
        kind=kind,
        content=content,
        batch=options.batch[-1],
        iterations=options.iterations,
        rounds=options.rounds,
        warmup=options.warmup,
        sweep_iterations=options.sweep_iterations,
        controller=options.controller or DEFAULT_CONTROLLER,
        servers=servers,
        optimizer=options.optimizer,
        clip=options.clip,
        compute_scale=options.compute_scale,
        comm_ratio=options.comm_ratio,
        record=tuple(options.batch) if options.record else (),
        threads=options.threads,
        ranks_per_host=options.ranks_per_host,
        timeout_s=options.timeout_s,
    )


def _has_experts(content: object) -> bool:
    return bool(parse_profile(content, "of the bench").exchanged_bytes)


def _check_launch(options: Namespace, view: RankView) -> None:
    if options.model and options.emulate:
        raise ConfigError("--model and --emulate exclude each other")
    if not options.model and not options.emulate:
        options.model = MODELS[0]
    if view.launcher != "none":
        if options.lab or options.workers:
            raise ConfigError(f"--lab and --workers start ranks, and {view.launcher} has done so")
        if view.world_size < 2:
            raise ConfigError(f"{view.launcher} started one rank, which has nothing to send")
    if options.lab and options.workers:
        raise ConfigError("--lab and --workers exclude each other")
    if options.rate and not options.lab:
        raise ConfigError("--rate shapes the links of emulated hosts and needs --lab N")
    for name in ("lab", "workers"):
        value = getattr(options, name)
        if value is not None and not 2 <= value <= 64:
            raise ConfigError(f"--{name} {value}: from 2 to 64")
    if not 1 <= options.ranks_per_host <= 64:
        raise ConfigError(f"--ranks-per-host {options.ranks_per_host}: from 1 to 64")
    if options.ranks_per_host > 1 and not options.lab:
        raise ConfigError("--ranks-per-host is for emulated hosts and needs --lab N")


def _check_numbers(options: Namespace) -> None:
    least = {
        "iterations": 1,
        "rounds": 1,
        "warmup": 2,
        "sweep_iterations": 1,
        "threads": 0,
    }
    for name, lowest in least.items():
        if getattr(options, name) < lowest:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(options, name)}: at least {lowest}")
    for name in ("comm_ratio", "compute_scale", "timeout_s"):
        value = getattr(options, name)
        if value is not None and not 1e-3 <= value <= 1e6:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value}: a positive number, 0.001 to 1000000")
    if not 0 <= options.clip <= 1e6:
        raise ConfigError(f"--clip {options.clip}: a norm, 0 (none) to 1000000")
    if options.comm_ratio and options.compute_scale != 1.0:
        raise ConfigError("--comm-ratio and --compute-scale exclude each other")


def _check_batches(batches: Sequence[int], kind: str, *, recorded: bool) -> None:
    several = len(batches) > 1
    if batches[0] < several:
        raise ConfigError(f"--batch {batches[0]}: at least {several:d}")
    if several and (kind != "model" or not recorded):
        raise ConfigError(
            f"--batch with several sizes is for --record of {', '.join(MODELS)}: systems are "
            "measured with one"
        )


def _check_outputs(options: Namespace) -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("bench needs torch: pip install 'bytesched[torch]'")
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib: pip install 'bytesched[report]'")
    for name in ("json", "png", "record"):
        path = getattr(options, name)
        if path and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder")
