"""The options of `bytesched sim`, and what they ask for."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bytesched.bench.profile import Profile, load_profile, shipped_profiles
from bytesched.bench.systems import EXCHANGE_SYSTEMS, System, check_option, parse_systems
from bytesched.errors import ConfigError
from bytesched.link.algorithms import ALGORITHMS, GLOO_RANKS, LIBRARIES
from bytesched.link.cluster import LEAST_ITERATIONS
from bytesched.link.fabric import Cores, Fabric
from bytesched.parser import CommandParser
from bytesched.policy import named_policy
from bytesched.sim.curve import AXES, Climate
from bytesched.sim.measure import Links
from bytesched.sim.recorded import recorded_jitter
from bytesched.sim.systems import LAB_COSTS, SYSTEMS, Costs, Model
from bytesched.values import one_of, parse_size

__all__ = [
    "check_outputs",
    "climate_of",
    "fabric_of",
    "given_costs",
    "jitter",
    "model_of",
    "shared_profiles",
    "sim_parser",
    "systems_of",
]

MOST_RANKS = 4096
EPILOG = """\
  bytesched sim --profile gpt --ranks 2,8,64 --bandwidth 10gbit
  bytesched bench --model my.models:build --record mine.json --systems ddp --rounds 1
  bytesched sim --profile mine.json --ranks 8,64,1024 --bandwidth 100gbit --latency-us 10
"""


def sim_parser() -> argparse.ArgumentParser:
    """The parser of its arguments."""
    parser = CommandParser(
        prog="bytesched sim",
        description="Predict the time of an iteration of DDP, FSDP2 and bytesched on a cluster:\n"
        "the decisions are those of the real code, the links are a model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    systems, of_experts = ",".join(SYSTEMS), ",".join(EXCHANGE_SYSTEMS)
    rows: tuple[tuple[str, str, Callable[[str], Any], Any, str], ...] = (
        (
            "profile",
            "PROFILE",
            str,
            "gpt",
            f"the model: {', '.join(shipped_profiles())}, FILE.json",
        ),
        ("ranks", "LIST", _ranks, [2, 8, 64], "numbers of ranks (2,8,64)"),
        ("bandwidth", "RATE", str, "10gbit", "bandwidth of each rank's link (%(default)s)"),
        ("latency-us", "US", _positive, 30.0, "latency of one message (%(default)s)"),
        (
            *("cores-per-rank", "C", _positive, None),
            "cores that each rank has, 0.5 where two share one (default: enough; with --measure "
            "those of this machine)",
        ),
        (
            *("cpu-load", "X", _load, 0.0),
            "cores that the model itself keeps busy, 1 where it computes on one (default 0: it "
            "computes on an accelerator)",
        ),
        (
            *("systems", "LIST", str, None),
            f"what to predict ({systems}; of a profile with layers of experts {of_experts})",
        ),
        ("compute-scale", "X", _positive, 1.0, "a device that is X times as slow"),
        (
            *("update-gb-per-s", "X", _positive, None),
            "gradients that the optimizer applies in a second (default: 100, or as measured)",
        ),
        (
            *("jitter", "X%|TRACE", jitter, 0.0),
            "how much a rank's compute varies between iterations, or what a trace recorded",
        ),
        (
            *("straggler", "RANK:X%", _straggler, None),
            "a rank whose compute always takes so much longer",
        ),
        ("iterations", "N", int, 40, "how many to simulate (default %(default)s)"),
        ("json", "FILE", str, None, "write every figure"),
        ("png", "FILE", str, None, "draw where it pays over bandwidth and ranks, or the curve"),
    )
    for name, metavar, kind, default, line in rows:
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, default=default, help=line)
    add: Any = parser.add_argument
    add(
        "--algorithm",
        choices=("auto", *ALGORITHMS),
        default="auto",
        help="how an all-reduce runs: one of these, or what the library takes for its size and "
        "ranks (default auto)",
    )
    add(
        "--backend",
        choices=[name for name in LIBRARIES if name != "auto"],
        help=f"the library; nccl: the start of a collective does not hide behind the one before it "
        f"(default gloo; mpi for more than {GLOO_RANKS} ranks)",
    )
    add(
        "--measure",
        action="store_true",
        help="take bandwidth and latency, cores and what messages, tensors and bytes cost them "
        "from the ranks that a launcher has started, or two processes here (half a minute)",
    )
    add(
        "--share",
        nargs="?",
        const="",
        metavar="PROFILES",
        help="predict jobs that take turns on shared devices: beside that of --profile one like "
        "it, or one of each of these",
    )
    add("--clip", action="store_true", help="the script clips by the norm of all gradients")
    add("--curve", choices=AXES, help="go along an axis, from the first of --ranks")
    return parser


def _ranks(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not 2 <= found[0] <= found[-1] <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: from 2 to {MOST_RANKS}, as 2,8,64")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _share(text: str) -> float:
    """A share such as 3% or 0.03."""
    number, percent, rest = text.partition("%")
    share = _number(number) / (100 if percent else 1)
    if rest or not 0 <= share <= 10:
        raise argparse.ArgumentTypeError(f"{text!r}: a share, as 3% or 0.03")
    return share


def jitter(text: str) -> float:
    """A share such as 3%, or what a trace file has recorded. Raises ArgumentTypeError."""
    path = Path(text)
    if not path.is_file():
        return _share(text)
    try:
        return recorded_jitter(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _straggler(text: str) -> tuple[int, float]:
    rank, _, late = text.partition(":")
    if not rank.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a rank and by how much it is late, as 1:30%")
    return int(rank), _share(late)


def _positive(text: str) -> float:
    number = _number(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: a positive number")
    return number


def _load(text: str) -> float:
    return 0.0 if text == "0" else _positive(text)


# -- what they ask for -----------------------------------------------------------------


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


def _above_0(text: str) -> None:
    if not 0 < float(text) < math.inf:
        raise ValueError(f"{text} is no size")


_CHUNKS: Final = {
    "partition_bytes": parse_size,
    "credit_bytes": parse_size,
    "policy": named_policy,
}
_CHUNKS_BESIDE_EXPERTS: Final = {
    "partition_bytes": parse_size,
    "policy": one_of("priority", "fifo"),
}
_BUCKETS: Final = {"bucket_mb": _above_0, "bucket_view": one_of("0", "1")}


def systems_of(options: argparse.Namespace, *, has_experts: bool) -> tuple[System, ...]:
    """What is predicted. Raises `ConfigError`."""
    for name in ("clip", "jitter", "straggler", "cores_per_rank") if has_experts else ():
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is not for a profile with layers of experts: its "
                "ranks are alike, and clip nothing"
            )
    known: tuple[str, ...] = EXCHANGE_SYSTEMS if has_experts else SYSTEMS
    plain = ("ddp-best", "fsdp2", "idle")
    with_options = tuple(name for name in (*SYSTEMS, *EXCHANGE_SYSTEMS) if name not in plain)
    systems = parse_systems(options.systems or ",".join(known), known, with_options)
    chunks = _CHUNKS_BESIDE_EXPERTS if has_experts else _CHUNKS
    for system in systems:
        checks: dict[str, Any] = _BUCKETS if system.kind.startswith("ddp") else chunks
        for name, value in system.options.items():
            check_option(system.label, name, value, checks)
    return systems


def climate_of(options: argparse.Namespace) -> Climate:
    """How ranks differ from each other and from one iteration to the next. Raises `ConfigError`."""
    if not options.straggler:
        return Climate(jitter=options.jitter)
    rank, late = options.straggler
    # A map is drawn over all ranks, too.
    over_ranks = options.curve == "ranks" or (options.png and not options.curve)
    fewest = AXES["ranks"].points[0] if over_ranks else options.ranks[0]
    if rank >= fewest:
        raise ConfigError(f"--straggler {rank}: there is no such rank among {fewest:g}")
    return Climate(jitter=options.jitter, late=1 + late)


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
