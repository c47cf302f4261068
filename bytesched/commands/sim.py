"""`bytesched sim`: what systems would take on a cluster, before anybody pays for it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bytesched.bench.profile import Profile, load_profile, shipped_profiles
from bytesched.bench.systems import EXCHANGE_SYSTEMS, System, parse_systems
from bytesched.environment import rank_view
from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.lab.hosts import parse_rate
from bytesched.link.algorithms import ALGORITHMS, GLOO_RANKS, LIBRARIES
from bytesched.link.cores import Cores
from bytesched.link.fabric import Fabric
from bytesched.policy import named_policy
from bytesched.sim.curve import AXES, SEND_S, Case, sweep
from bytesched.sim.measure import Links, Measured, measured
from bytesched.sim.picture import draw_map, draw_sweep
from bytesched.sim.recorded import recorded_jitter
from bytesched.sim.sharing import SHARING_LEGEND, predict_sharing, sharing_rows
from bytesched.sim.systems import LAB_COSTS, SYSTEMS, Costs, Model
from bytesched.sim.table import EXCHANGE_LEGEND, LEGEND, rows
from bytesched.sim.verdict import gain, verdict
from bytesched.sim.weather import Climate
from bytesched.table import aligned
from bytesched.tunable import ORDERS
from bytesched.values import nearest, one_of, parse_size

__all__ = ["jitter", "main"]

MOST_RANKS = 4096
#: what the options of each system may be
_OPTIONS = {
    "ddp": ("bucket_mb", "bucket_view"),
    "bytesched": ("partition_bytes", "credit_bytes", "policy", "order"),
    "split": ("partition_bytes", "credit_bytes"),
    "ddp-own-group": ("bucket_mb", "bucket_view"),
    "bytesched-no-lane": ("partition_bytes", "credit_bytes", "policy"),
    "bytesched-pieces": ("partition_bytes", "credit_bytes", "policy"),
}
EPILOG = """\
  bytesched sim --profile gpt --ranks 2,8,64 --bandwidth 10gbit
  bytesched bench --model my.models:build --record mine.json --systems ddp --rounds 1
  bytesched sim --profile mine.json --ranks 8,64,1024 --bandwidth 100gbit --latency-us 10
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when that went well, 1 if a file cannot be written."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        _check_outputs(options)
        climate, model = _climate(options), _model(options)
        options.sharing = _shared_profiles(options, model.profile)
        systems = _systems(options, has_experts=bool(model.profile.exchanged_bytes))
        links = Links(parse_rate(options.bandwidth) / 8, options.latency_us / 1e6, "")
    except ConfigError as error:
        parser.error(str(error))
    facts: Measured | None = None
    if options.measure:
        found = measured(rank_view())
        if found is None:
            return 0
        facts, origin = found
        links = Links.of(facts, origin)
        model = replace(model, costs=_given(facts.costs(model.costs), options))
    cases = [
        Case(model, _fabric(options, links, ranks), systems, climate, options.iterations)
        for ranks in options.ranks
    ]
    print("\n".join(_headline(cases[0], links)))
    print()
    if options.share is not None:
        predictions = _sharing(cases, options.sharing)
    elif options.curve:
        predictions = _curve(cases[0], options)
    else:
        predictions = _table(cases)
        if options.png:
            draw_map(cases[0], Path(options.png))
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
    for kind in ("json", "png"):
        if getattr(options, kind):
            print(f"{kind}: {getattr(options, kind)}")
    return 0


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
    print("\n".join(aligned(lines, "><<" + (len(lines[0]) - 3) * ">")))
    has_exchanges = bool(cases[0].model.profile.exchanged_bytes)
    print(f"{EXCHANGE_LEGEND if has_exchanges else LEGEND}\n")
    for case, of_case in zip(cases, found, strict=True):
        print(verdict(case, of_case))
    return [one.to_json() for of_case in found for one in of_case]


def _sharing(cases: Sequence[Case], profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """Print what jobs of these profiles take, of which that of the cases is the first."""
    found = []
    for case in cases:
        models = [case.model, *(replace(case.model, profile=profile) for profile in profiles)]
        jobs = predict_sharing([replace(case, model=model) for model in models])
        found.append((case.fabric.ranks, jobs))
    lines = sharing_rows(found)
    print("\n".join(aligned(lines, ">" * len(lines[0]))))
    print(SHARING_LEGEND)
    return [{"ranks": ranks, "jobs": [asdict(job) for job in jobs]} for ranks, jobs in found]


def _shared_profiles(options: argparse.Namespace, first: Profile) -> list[Profile]:
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


def _curve(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the systems along an axis."""
    axis = AXES[options.curve]
    found = sweep(case, axis)
    titles = (axis.title, *(system.label for system in case.systems), "vs best")
    lines = [titles]
    for point, of_point in found:
        cells = (f"{one.to_optimum:.3f}" for one in of_point)
        lines.append((f"{point:g}", *cells, f"{gain(of_point):.2f}x"))
    print("\n".join(aligned(lines, ">" * len(titles))))
    print("multiples of T*; vs best: how many times as fast as the best of the others ours is")
    if options.png:
        draw_sweep(case, axis, found, Path(options.png))
    return [{"at": point} | one.to_json() for point, of_point in found for one in of_point]


def _headline(case: Case, links: Links) -> list[str]:
    model, profile = case.model, case.model.profile
    spread = case.climate.jitter
    return [
        f"{profile.name}: {profile.nbytes / 1e6:.1f} MB of gradients in "
        f"{len(model.tensors())} tensors, compute {1e3 * profile.compute_s:.1f} ms"
        f"{', clipped' if model.clip else ''}; {case.iterations} iterations"
        f"{f', jitter {100 * spread:.2g} %' if spread else ''}",
        f"{_link(case, links)}",
        f"assumed: {1e6 * SEND_S:g} us of CPU to send a word of the order; an "
        f"update of {1e3 * model.update_s(profile.nbytes):.1f} ms",
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
_RUNNING = {
    "auto": f"ring up to {GLOO_RANKS} ranks as in Gloo, then doubling or halving by size as in MPI",
    "gloo": "ring, which is all that Gloo has",
    "mpi": "doubling or halving by size, as in MPI",
    "nccl": "ring or trees by size, as in NCCL",
}


def _check_outputs(options: argparse.Namespace) -> None:
    for name in ("json", "png"):
        path = getattr(options, name)
        if path and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder")
    if options.iterations < 1:
        raise ConfigError(f"--iterations {options.iterations}: at least 1")


def _model(options: argparse.Namespace) -> Model:
    profile = load_profile(options.profile).scaled(options.compute_scale)
    costs = Costs(update_bytes_per_s=100e9, cpu_load=options.cpu_load)
    if options.cores_per_rank:
        costs = replace(LAB_COSTS, cpu_load=options.cpu_load, update_bytes_per_s=100e9)
    return Model(profile, _given(costs, options), clip=options.clip)


def _given(costs: Costs, options: argparse.Namespace) -> Costs:
    """The costs with what the options say in place of what is measured or assumed."""
    if options.cores_per_rank:
        costs = replace(costs, cores=Cores(options.cores_per_rank))
    if options.update_gb_per_s:
        costs = replace(costs, update_bytes_per_s=options.update_gb_per_s * 1e9)
    return costs


def _fabric(options: argparse.Namespace, links: Links, ranks: int) -> Fabric:
    library = options.backend or "auto"
    return Fabric(
        ranks=ranks,
        bytes_per_s=links.bytes_per_s,
        latency_s=links.latency_s,
        algorithm=library if options.algorithm == "auto" else options.algorithm,
        overlaps=options.backend != "nccl",
    )


def _systems(options: argparse.Namespace, *, has_experts: bool) -> tuple[System, ...]:
    if has_experts:
        _check_alike(options)
    known: tuple[str, ...] = EXCHANGE_SYSTEMS if has_experts else SYSTEMS
    text = options.systems or ",".join(known if has_experts else SYSTEMS[:-1])
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
    elif name == "order":
        one_of(*ORDERS)(value)
    elif name == "policy":
        named_policy(value)
    else:
        parse_size(value)


def _climate(options: argparse.Namespace) -> Climate:
    climate = Climate(jitter=options.jitter)
    if options.straggler:
        rank, late = options.straggler
        # A map is drawn over all ranks, too.
        over_ranks = options.curve == "ranks" or (options.png and not options.curve)
        fewest = AXES["ranks"].points[0] if over_ranks else options.ranks[0]
        if rank >= fewest:
            raise ConfigError(f"--straggler {rank}: there is no such rank among {fewest:g}")
        climate = replace(climate, straggler=rank, late=1 + late)
    return climate


def _ranks(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not 2 <= found[0] <= found[-1] <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: from 2 to {MOST_RANKS}, as 2,8,64")
    return found


def _share(text: str) -> float:
    """A share such as 3% or 0.03."""
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
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
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: a positive number")
    return number


def _load(text: str) -> float:
    return 0.0 if text == "0" else _positive(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bytesched sim",
        description="Predict the time of an iteration of DDP, FSDP2 and bytesched on a cluster:\n"
        "the decisions are those of the real code, the links are a model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Any = parser.add_argument
    shipped = ", ".join(shipped_profiles())
    add("--profile", default="gpt", metavar="PROFILE", help=f"the model: {shipped} or FILE.json")
    add(
        "--ranks", type=_ranks, default=[2, 8, 64], metavar="LIST", help="numbers of ranks (2,8,64)"
    )
    add(
        "--bandwidth",
        default="10gbit",
        metavar="RATE",
        help="bandwidth of each rank's link (%(default)s)",
    )
    add(
        "--latency-us",
        type=_positive,
        default=30.0,
        metavar="US",
        help="latency of one message (%(default)s)",
    )
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
        "--cores-per-rank",
        type=_positive,
        metavar="C",
        help="cores that each rank has, 0.5 where two share one (default: enough; with --measure "
        "those of this machine)",
    )
    add(
        "--cpu-load",
        type=_load,
        default=0.0,
        metavar="X",
        help="cores that the model itself keeps busy, 1 where it computes on one (default 0: it "
        "computes on an accelerator)",
    )
    add(
        "--measure",
        action="store_true",
        help="take bandwidth and latency, cores and what messages, tensors and bytes cost them "
        "from the ranks that a launcher has started, or two processes here (half a minute)",
    )
    add(
        "--systems",
        metavar="LIST",
        help=f"what to predict ({','.join(SYSTEMS[:-1])}; of a profile with layers of experts "
        f"{','.join(EXCHANGE_SYSTEMS)})",
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
    add(
        "--compute-scale",
        type=_positive,
        default=1.0,
        metavar="X",
        help="a device that is X times as slow",
    )
    add(
        "--update-gb-per-s",
        type=_positive,
        metavar="X",
        help="gradients that the optimizer applies in a second (default: 100, or as measured)",
    )
    add(
        "--jitter",
        type=jitter,
        default=0.0,
        metavar="X%|TRACE",
        help="how much a rank's compute varies between iterations, or what a trace recorded",
    )
    add(
        "--straggler",
        type=_straggler,
        metavar="RANK:X%",
        help="a rank whose compute always takes so much longer",
    )
    add(
        "--iterations",
        type=int,
        default=40,
        metavar="N",
        help="how many to simulate (default %(default)s)",
    )
    add("--curve", choices=AXES, help="go along an axis, from the first of --ranks")
    add("--json", metavar="FILE", help="write every figure")
    add("--png", metavar="FILE", help="draw where it pays over bandwidth and ranks, or the curve")
    return parser
