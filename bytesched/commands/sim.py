"""`bytesched sim`: what systems would take on a cluster, before anybody pays for it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from bytesched.bench.profile import load_profile
from bytesched.bench.systems import System, check_option, parse_systems
from bytesched.environment import rank_view
from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.lab.hosts import parse_rate
from bytesched.link.fabric import ALGORITHMS, GLOO_RANKS, LIBRARIES, Cores, Fabric
from bytesched.parser import CommandParser, Option, read_by, within, writable_file
from bytesched.policy import named_policy
from bytesched.sim.measure import Links, Measured, measured
from bytesched.sim.systems import LAB_COSTS, SYSTEMS, Costs, Model
from bytesched.sim.table import LEGEND, Case, rows, verdict
from bytesched.table import aligned
from bytesched.values import parse_size

MOST_RANKS: Final = 4096
#: bytes of gradients per second, by the optimizer
_UPDATED: Final = 100e9
EPILOG: Final = """\
  bytesched sim --profile gpt --ranks 2,8,64 --rate 10gbit
  bytesched bench --model my.models:build --record mine.json --systems ddp --rounds 1
  bytesched sim --profile mine.json --ranks 8,64,1024 --rate 100gbit --latency-us 10
"""
_ALIKE: Final = "ranks are alike: one stands for all"
_SEVERAL: Final = "give several --ranks, and one --rate after the other"
REPLACED: Final = {
    "--algorithm": "--backend takes algorithms, too",
    "--bandwidth": "it is --rate",
    "--curve": _SEVERAL,
    "--iterations": "what is predicted is the same in each",
    "--jitter": _ALIKE,
    "--png": _SEVERAL,
    "--share": "what was predicted and measured is in the notes on jobs that take turns",
    "--straggler": _ALIKE,
    "--update-gb-per-s": "--measure finds that out",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when that went well."""
    options = _parser().parse_args(argv)
    model, systems = _model(options), _systems(options)
    links = Links(options.rate / 8, options.latency_us / 1e6, "")
    facts: Measured | None = None
    if options.measure:
        found = measured(rank_view())
        if found is None:
            return 0
        facts, origin = found
        links = Links.of(facts, origin)
        costs = facts.costs(model.costs)
        if options.cores_per_rank:
            costs = replace(costs, cores=Cores(options.cores_per_rank))
        model = replace(model, costs=costs)
    cases = [Case(model, _fabric(options, links, ranks), systems) for ranks in options.ranks]
    print("\n".join(_headline(cases[0], links)))
    print()
    predictions = _table(cases)
    if options.json:
        content = {
            "profile": options.profile,
            "clip": options.clip,
            "link": _link(cases[0], links),
            "costs": _finite(asdict(model.costs)),
            "measured": facts and asdict(facts),
            "predictions": predictions,
        }
        write_text(Path(options.json), json.dumps(content, indent=1) + "\n")
        print(f"json: {options.json}")
    return 0


# -- what is asked for -----------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="bytesched sim",
        description="Predict the time of an iteration of DDP and bytesched on a cluster:\n"
        "the decisions are those of the real code, the links are a model.",
        epilog=EPILOG,
        replaced=REPLACED,
    )
    positive = within(1e-9, 1e9)
    parser.add_options(
        (
            Option("--profile", "PROFILE", str, "gpt", "the model: gpt, resnet, vgg, FILE.json"),
            Option("--ranks", "LIST", _ranks, [2, 8, 64], "numbers of ranks (2,8,64)"),
            Option("--rate", "RATE", read_by(parse_rate), "10gbit", "each rank's link (10gbit)"),
            Option("--latency-us", "US", positive, 30.0, "latency of one message (30)"),
            Option(
                *("--cores-per-rank", "C", positive, None),
                "cores that each rank has, 0.5 where two share one (default: enough; with "
                "--measure those of this machine)",
            ),
            Option(
                *("--cpu-load", "X", within(0.0, 1e9), 0.0),
                "cores that the model itself keeps busy, 1 where it computes on one (default 0: it "
                "computes on an accelerator)",
            ),
            Option("--systems", "LIST", str, None, f"what to predict ({','.join(SYSTEMS)})"),
            Option("--compute-scale", "X", positive, 1.0, "a device that is X times as slow"),
            Option("--json", "FILE", writable_file, None, "write every figure"),
        )
    )
    parser.add_argument(
        "--backend",
        choices=[*(name for name in LIBRARIES if name != "auto"), *ALGORITHMS],
        help="the library, or one algorithm for every all-reduce; nccl: the start of a collective "
        f"does not hide behind the one before it (default gloo; mpi for more than {GLOO_RANKS} "
        "ranks)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="take bandwidth and latency, cores and what messages, tensors and bytes cost them "
        "from the ranks that a launcher has started, or two processes here (half a minute)",
    )
    parser.add_argument(
        "--clip", action="store_true", help="the script clips by the norm of all gradients"
    )
    return parser


def _ranks(text: str) -> list[int]:
    return sorted(set(map(within(2, MOST_RANKS), text.split(","))))


def _model(options: argparse.Namespace) -> Model:
    """The profile, with what updates and cores cost. Raises `ConfigError`."""
    profile = load_profile(options.profile).scaled(options.compute_scale)
    if profile.exchanged_bytes:
        raise ConfigError(
            f"--profile {options.profile} has layers of experts, whose all-to-alls are not "
            f"predicted: measure them, bytesched bench --lab 2 --emulate {options.profile}"
        )
    costs = Costs(update_bytes_per_s=_UPDATED)
    if options.cores_per_rank:
        costs = replace(LAB_COSTS, update_bytes_per_s=_UPDATED, cores=Cores(options.cores_per_rank))
    return Model(profile, replace(costs, cpu_load=options.cpu_load), clip=options.clip)


def _fabric(options: argparse.Namespace, links: Links, ranks: int) -> Fabric:
    """The network that so many ranks share."""
    return Fabric(
        ranks=ranks,
        bytes_per_s=links.bytes_per_s,
        latency_s=links.latency_s,
        algorithm=options.backend or "auto",
        overlaps=options.backend != "nccl",
    )


_CHUNKS: Final[dict[str, Any]] = {
    "partition_bytes": parse_size,
    "credit_bytes": parse_size,
    "policy": named_policy,
}


def _systems(options: argparse.Namespace) -> tuple[System, ...]:
    """What is predicted. Raises `ConfigError`."""
    systems = parse_systems(options.systems or ",".join(SYSTEMS), SYSTEMS, ("ddp", "bytesched"))
    for system in systems:
        for name, value in system.options.items() if system.kind == "bytesched" else ():
            check_option(system.label, name, value, _CHUNKS)
    return systems


# -- what is said ----------------------------------------------------------------------


def _finite(content: dict[str, Any]) -> dict[str, Any]:
    """The same with None for what has no limit, as JSON has no infinity."""
    return {
        name: _finite(value) if isinstance(value, dict) else None if math.isinf(value) else value
        for name, value in content.items()
    }


def _table(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Print the systems of every case, and the sentences."""
    found = [case.predictions() for case in cases]
    lines = rows(found)
    print("\n".join(aligned(lines, "><<>>>>")))
    print(f"{LEGEND}\n")
    for case, of_case in zip(cases, found, strict=True):
        print(verdict(case, of_case))
    return [one.to_json() for of_case in found for one in of_case]


def _headline(case: Case, links: Links) -> list[str]:
    model, profile = case.model, case.model.profile
    return [
        f"{profile.name}: {profile.nbytes / 1e6:.1f} MB of gradients in "
        f"{len(model.tensors())} tensors, compute {1e3 * profile.compute_s:.1f} ms"
        f"{', clipped' if model.clip else ''}",
        _link(case, links),
        f"assumed: an update of {1e3 * model.update_s(profile.nbytes):.1f} ms",
        *_processors(model.costs, links),
    ]


def _processors(costs: Costs, links: Links) -> list[str]:
    """What ranks compute and send with; nothing where cores are no limit."""
    cores = costs.cores.per_rank
    if math.isinf(cores):
        return []
    each = (
        f"{name} {1e6 * cpu.message_s:.3g} us a message, {1e6 * cpu.tensor_s:.3g} us a tensor, "
        f"{1e9 * cpu.byte_s:.3g} ms a MB"
        for name, cpu in (("bytesched", costs.scheduled), ("the others", costs.plain))
    )
    return [
        f"{cores:.3g} cores for each rank, of which the model keeps {costs.cpu_load:.2g} busy; CPU "
        f"time, {'measured' if links.origin else 'assumed'}: {'; '.join(each)}"
    ]


def _link(case: Case, links: Links) -> str:
    fabric = case.fabric
    overlap = "hides" if fabric.overlaps else "does not hide"
    return (
        f"{f'measured ({links.origin})' if links.origin else 'assumed'}: "
        f"{8e-9 * links.bytes_per_s:.4g} Gbit/s in either direction of every rank, "
        f"{1e6 * links.latency_s:.4g} us a message; "
        f"{_RUNNING.get(fabric.algorithm, fabric.algorithm)}, of which the start {overlap} behind "
        "the collective before it"
    )


#: what the algorithm of a fabric is called
_RUNNING: Final = {
    "auto": f"ring up to {GLOO_RANKS} ranks as in Gloo, then doubling or halving by size as in MPI",
    "gloo": "ring, which is all that Gloo has",
    "mpi": "doubling or halving by size, as in MPI",
    "nccl": "ring or trees by size, as in NCCL",
}
