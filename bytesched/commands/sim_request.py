"""What the options of `bytesched sim` ask for."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from bytesched.bench.profile import Profile, load_profile
from bytesched.bench.systems import EXCHANGE_SYSTEMS, System, parse_systems
from bytesched.errors import ConfigError
from bytesched.link.cluster import LEAST_ITERATIONS
from bytesched.link.fabric import Cores, Fabric
from bytesched.policy import named_policy
from bytesched.sim.curve import AXES, Climate
from bytesched.sim.measure import Links
from bytesched.sim.systems import LAB_COSTS, SYSTEMS, Costs, Model
from bytesched.values import nearest, one_of, parse_size

__all__ = [
    "check_outputs",
    "climate_of",
    "fabric_of",
    "given_costs",
    "model_of",
    "shared_profiles",
    "systems_of",
]

#: what the options of each system may be
_OPTIONS = {
    "ddp": ("bucket_mb", "bucket_view"),
    "bytesched": ("partition_bytes", "credit_bytes", "policy"),
    "ddp-own-group": ("bucket_mb", "bucket_view"),
    "bytesched-no-lane": ("partition_bytes", "credit_bytes", "policy"),
    "bytesched-pieces": ("partition_bytes", "credit_bytes", "policy"),
}


def check_outputs(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for what could not be written, drawn or counted."""
    for name in ("json", "png"):
        path = getattr(options, name)
        if path and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder")
    if options.png and find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib: pip install 'bytesched[report]'")
    if options.iterations < LEAST_ITERATIONS:
        raise ConfigError(
            f"--iterations {options.iterations}: at least {LEAST_ITERATIONS}, in the first half "
            "of which an order is planned"
        )


def model_of(options: argparse.Namespace) -> Model:
    """The profile, with what updates and cores cost. Raises `ConfigError`."""
    profile = load_profile(options.profile).scaled(options.compute_scale)
    costs = Costs(update_bytes_per_s=100e9, cpu_load=options.cpu_load)
    if options.cores_per_rank:
        costs = replace(LAB_COSTS, cpu_load=options.cpu_load, update_bytes_per_s=100e9)
    return Model(profile, given_costs(costs, options), clip=options.clip)


def given_costs(costs: Costs, options: argparse.Namespace) -> Costs:
    """The costs with what the options say in place of what is measured or assumed."""
    if options.cores_per_rank:
        costs = replace(costs, cores=Cores(options.cores_per_rank))
    if options.update_gb_per_s:
        costs = replace(costs, update_bytes_per_s=options.update_gb_per_s * 1e9)
    return costs


def fabric_of(options: argparse.Namespace, links: Links, ranks: int) -> Fabric:
    """The network that so many ranks share."""
    library = options.backend or "auto"
    return Fabric(
        ranks=ranks,
        bytes_per_s=links.bytes_per_s,
        latency_s=links.latency_s,
        algorithm=library if options.algorithm == "auto" else options.algorithm,
        overlaps=options.backend != "nccl",
    )


def systems_of(options: argparse.Namespace, *, has_experts: bool) -> tuple[System, ...]:
    """What is predicted. Raises `ConfigError`."""
    if has_experts:
        _check_alike(options)
    known: tuple[str, ...] = EXCHANGE_SYSTEMS if has_experts else SYSTEMS
    text = options.systems or ",".join(known)
    systems = parse_systems(text, known, tuple(_OPTIONS))
    for system in systems:
        for name, value in system.options.items():
            known = _OPTIONS[system.kind]
            if name not in known:
                raise ConfigError(f"--systems: {system.label!r}: {name!r}{nearest(name, known)}")
            try:
                _check_option(name, value)
            except ValueError as error:
                raise ConfigError(f"--systems: {system.label!r}: {name}: {error}") from None
    return systems


def _check_alike(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for what cannot be predicted of layers of experts."""
    for name in ("clip", "jitter", "straggler", "cores_per_rank"):
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is not for a profile with layers of experts: its "
                "ranks are alike, and clip nothing"
            )


def _check_option(name: str, value: str) -> None:
    if name == "bucket_view":
        one_of("0", "1")(value)
    elif name == "bucket_mb":
        if not 0 < float(value) < math.inf:
            raise ValueError(f"{value} is no size")
    elif name == "policy":
        named_policy(value)
    else:
        parse_size(value)


def climate_of(options: argparse.Namespace) -> Climate:
    """How ranks differ from each other and from one iteration to the next. Raises `ConfigError`."""
    climate = Climate(jitter=options.jitter)
    if options.straggler:
        rank, late = options.straggler
        # A map is drawn over all ranks, too.
        over_ranks = options.curve == "ranks" or (options.png and not options.curve)
        fewest = AXES["ranks"].points[0] if over_ranks else options.ranks[0]
        if rank >= fewest:
            raise ConfigError(f"--straggler {rank}: there is no such rank among {fewest:g}")
        climate = replace(climate, late=1 + late)
    return climate


def shared_profiles(options: argparse.Namespace, first: Profile) -> list[Profile]:
    """Of the jobs beside the first one. Raises `ConfigError`."""
    if options.share is None:
        return []
    for name in ("curve", "png", "systems"):
        if getattr(options, name):
            raise ConfigError(f"--{name} is not for --share")
    names = [name for name in options.share.split(",") if name]
    profiles = [load_profile(name).scaled(options.compute_scale) for name in names] or [first]
    if any(profile.exchanged_bytes for profile in (first, *profiles)):
        raise ConfigError("--share is not for a profile with layers of experts")
    return profiles
