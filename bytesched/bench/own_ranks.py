"""Measurements that start all their ranks themselves, on devices or stages that are emulated."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bytesched.bench.profile import Profile, parse_profile
from bytesched.bench.provenance import command_of, provenance
from bytesched.bench.setting import DEFAULT_RATE
from bytesched.bench.specification import Specification
from bytesched.environment import rank_view
from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.lab.ranks import Start, run_all

__all__ = ["OwnRanks", "common", "emulated", "measure"]


@dataclass(frozen=True, kw_only=True)
class OwnRanks:
    """What such measurements have in common."""

    #: of bytesched
    options: dict[str, str]
    iterations: int
    rounds: int
    warmup: int
    optimizer: str
    compute_scale: float
    comm_ratio: float | None
    threads: int
    timeout_s: float


def common(spec: Specification, options: Namespace) -> dict[str, Any]:
    """The fields of `OwnRanks`. Raises `ConfigError` for systems other than bytesched."""
    systems: dict[str, str] = {}
    if options.systems:
        if len(spec.systems) != 1 or spec.systems[0].kind != "bytesched":
            raise ConfigError(
                f"{_flag(options)} measures bytesched: --systems bytesched, with options if any"
            )
        systems = spec.systems[0].options
    names = [field.name for field in fields(OwnRanks) if field.name != "options"]
    return {"options": systems, **{name: getattr(spec, name) for name in names}}


def emulated(
    spec: Specification, options: Namespace, what: str, others: Sequence[str] = ()
) -> Profile:
    """The profile that is emulated. Raises `ConfigError` for what such a measurement has not.

    Args:
        what: it does with the profile.
        others: flags that it has not, beyond those that none of them has.
    """
    flag = _flag(options)
    if spec.kind != "emulate":
        raise ConfigError(f"{flag} {what}, and needs --emulate")
    if rank_view().launcher != "none":
        raise ConfigError(f"{flag} starts the ranks itself: leave the launcher out")
    for name in ("png", "record", "compare", "cpu", *others):
        if getattr(options, name):
            raise ConfigError(f"--{name} is not for {flag}")
    if spec.ranks_per_host > 1:
        raise ConfigError(f"{flag} places its ranks itself: leave --ranks-per-host out")
    profile = parse_profile(spec.content, "of the bench")
    if profile.exchanged_bytes:
        raise ConfigError(f"{flag} is not for a profile with layers of experts")
    return profile


def measure(
    worker: str,
    spec: OwnRanks,
    hosts: int,
    options: Namespace,
    arguments: Sequence[str],
    ranks_per_host: int = 1,
) -> tuple[dict[str, Any], str]:
    """What the ranks have found, which is written where ``--json`` says, and the network."""
    rate = (options.rate or DEFAULT_RATE) if options.lab else None
    # Before anything is measured: files may change meanwhile.
    origin = provenance(command_of(arguments))
    with tempfile.TemporaryDirectory(prefix="bytesched-bench-") as folder:
        start = Start(
            worker,
            result=str(Path(folder, "result.json")),
            threads=spec.threads,
            ranks_per_host=ranks_per_host,
        )
        network = run_all(spec, start, hosts, rate, Path(folder))
        found = json.loads(Path(start.result).read_text())
    if options.json:
        result = {**origin, "network": network, "specification": asdict(spec), **found}
        write_text(Path(options.json), json.dumps(result, indent=1) + "\n")
    return found, network


def _flag(options: Namespace) -> str:
    return "--pipeline" if options.share is None else "--share"
