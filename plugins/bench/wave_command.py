"""`bytesched wave`: waves measured in turn with what they stand beside."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bytesched.bench.profile import load_profile, shipped_profiles
from bytesched.bench.specification import WaveSpecification
from bytesched.bench.table import quartiles
from bytesched.errors import ConfigError
from bytesched.files import write_text
from bytesched.lab.ranks import Start, run_all
from bytesched.table import aligned

__all__ = ["main"]

WORKER = "bytesched.plugins.bench.wave_worker"
_LEAST_BYTES = 10_000
EPILOG = """\
  bytesched wave ticktock --model gpt --batch 2
  bytesched wave ticktock --emulate resnet --slots 2 --lab 2 --rate 1gbit
  bytesched wave model --emulate vgg --lab 4 --rate 10gbit --compute-scale 4
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when every system was measured."""
    parser = _parser()
    options = parser.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        parser.error("wave needs torch: pip install 'bytesched[torch]'")
    try:
        spec, hosts = specification(options)
    except ConfigError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="bytesched-wave-") as folder:
        start = Start(WORKER, result=str(Path(folder, "result.json")), threads=spec.threads)
        network = run_all(spec, start, hosts, options.rate if options.lab else None, Path(folder))
        found = json.loads(Path(start.result).read_text())
    arguments = sys.argv[2:] if argv is None else argv
    command = shlex.join(["bytesched", "wave", *arguments])
    print(f"\n{_headline(spec, hosts, network)}\n")
    print("\n".join(table(found, spec.reference)))
    if options.json:
        result = {
            "command": command,
            "network": network,
            "specification": asdict(spec),
            "systems": found,
        }
        write_text(Path(options.json), json.dumps(result, indent=1) + "\n")
    return 0


def specification(options: argparse.Namespace) -> tuple[WaveSpecification, int]:
    """What the options ask for, and of how many ranks. Raises `ConfigError`."""
    from .systems import partitions as bench_model
    from .systems import waves as bench_ticktock
    from .workloads.waves import MODELS

    if options.lab and options.workers:
        raise ConfigError("--lab and --workers exclude each other")
    hosts = options.lab or options.workers or (1 if options.kind == "ticktock" else 2)
    least = {"batch": 1, "iterations": 1, "rounds": 1, "warmup": 0, "threads": 1}
    least |= {"waves": 2, "slots": 1} if options.kind == "ticktock" else {"activation_bytes": 4}
    for name, lowest in least.items():
        if getattr(options, name) < lowest:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(options, name)}: at least {lowest}")
    for name in ("lab", "workers"):
        value = getattr(options, name)
        if value is not None and not 2 <= value <= 64:
            raise ConfigError(f"--{name} {value}: from 2 to 64")
    emulate: object = None
    model = options.model
    if options.emulate:
        profile = load_profile(options.emulate).scaled(options.compute_scale)
        emulate, model = profile.to_json(), profile.name
    own: dict[str, Any]
    if options.kind == "ticktock":
        if not emulate and model not in MODELS:
            raise ConfigError(f"--model {model!r}; there are {', '.join(MODELS)}")
        systems = [name for name, least in bench_ticktock.SYSTEMS.items() if hosts >= least]
        if emulate:
            systems.remove("one-batch")
        own = {"waves": options.waves, "slots": options.slots, "reference": "accumulation"}
    else:
        if not emulate and model != "vgg":
            raise ConfigError(f"--model {model!r}: of the models, vgg is a plain chain")
        systems = list(bench_model.SYSTEMS)
        own = {"activation_bytes": options.activation_bytes, "reference": "naive"}
    spec = WaveSpecification(
        systems=tuple(systems),
        kind=options.kind,
        model=model,
        emulate=emulate,
        batch=options.batch,
        iterations=options.iterations,
        rounds=options.rounds,
        warmup=options.warmup,
        threads=options.threads,
        timeout_s=300.0,
        **own,
    )
    return spec, hosts


def table(found: dict[str, list[list[dict[str, Any]]]], reference: str) -> list[str]:
    """The lines of a table: times, how much faster than ``reference``, memory, losses.

    ``found`` has, per system and round, what every rank has found.
    """
    medians = {
        system: [statistics.median(turn[0]["iteration_ms"]) for turn in turns]
        for system, turns in found.items()
    }
    rows: list[tuple[str, ...]] = [
        ("system", "step ms", "quartiles", "faster", "memory MB", "losses")
    ]
    for system, turns in found.items():
        every = [ms for turn in turns for ms in turn[0]["iteration_ms"]]
        first, median, third = quartiles(every)
        ratio = statistics.median(
            theirs / ours for theirs, ours in zip(medians[reference], medians[system], strict=True)
        )
        times = (f"{median:.1f}", f"{first:.0f} to {third:.0f}", f"{ratio:.2f}x")
        rows.append((system, *times, _memory(turns), _losses(found, system, reference)))
    return [
        *aligned(rows, "<>>>><"),
        "",
        f"faster: than {reference}, median over the rounds. memory: the most of any rank, of",
        "activations (ticktock), or of weights and gradients without an optimizer's state (model).",
    ]


def _memory(turns: list[list[dict[str, Any]]]) -> str:
    found = [
        rank.get("activation_bytes", rank.get("stats", {}).get("peak_bytes", 0))
        for turn in turns
        for rank in turn
    ]
    # Emulated layers keep next to nothing, which shows nothing of those that they stand for.
    return f"{max(found) / 1e6:.2f}" if max(found) > _LEAST_BYTES else "-"


def _losses(found: dict[str, list[list[dict[str, Any]]]], system: str, reference: str) -> str:
    """How far the losses, summed over the ranks, are from those of the reference."""

    def losses(name: str) -> list[float]:
        turn = found[name][0]
        return [sum(values) for values in zip(*(rank["losses"] for rank in turn), strict=True)]

    if system == "one-batch":
        return "of other batches"
    worst = max(
        abs(a - b) / max(abs(b), 1e-30)
        for a, b in zip(losses(system), losses(reference), strict=True)
    )
    return f"differ by {worst:.0e}" if worst else "identical"


def _headline(spec: WaveSpecification, hosts: int, network: str) -> str:
    work = f"{spec.model} (emulated compute)" if spec.emulate else spec.model
    batch = "" if spec.emulate else f", batches of {spec.batch}"
    many = f"{hosts} ranks, {network}" if hosts > 1 else "1 rank"
    waves = f", {spec.waves} waves" if spec.waves else ""
    return f"{work}{batch}{waves}, {many}, {spec.threads} threads each"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bytesched wave",
        description="Measure training in waves.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(required=True, metavar="KIND", dest="kind")
    ticktock = kinds.add_parser("ticktock", help="waves of one rank: time and activation memory")
    ticktock.add_argument("--waves", type=int, default=2, metavar="N", help="(%(default)s)")
    ticktock.add_argument(
        "--slots",
        type=int,
        default=2,
        metavar="N",
        help="layers that the emulated device computes at a time (%(default)s)",
    )
    model = kinds.add_parser("model", help="stages that travel, against pipelines")
    model.add_argument(
        "--activation-bytes",
        type=int,
        default=2**18,
        metavar="N",
        help="of a batch between emulated layers (%(default)s)",
    )
    for kind, default in ((ticktock, "gpt"), (model, "vgg")):
        add = kind.add_argument
        add("--model", default=default, metavar="NAME", help="computes for real (%(default)s)")
        add("--emulate", metavar="PROFILE", help=f"{', '.join(shipped_profiles())} or FILE.json")
        add("--compute-scale", type=float, default=1.0, metavar="X", help="emulate X x slower")
        add("--batch", type=int, default=4, metavar="N", help="of a wave (%(default)s)")
        add("--lab", type=int, metavar="N", help="N emulated hosts on this machine")
        add("--rate", default="1gbit", metavar="RATE", help="link of each of them (%(default)s)")
        add("--workers", type=int, metavar="N", help="N processes on loopback")
        add("--threads", type=int, default=1, metavar="N", help="of torch per rank (%(default)s)")
        add("--iterations", type=int, default=10, metavar="N", help="per round (%(default)s)")
        add("--warmup", type=int, default=3, metavar="N", help="untimed, per round (%(default)s)")
        add("--rounds", type=int, default=3, metavar="N", help="turns of each (%(default)s)")
        add("--json", metavar="FILE", help="write every figure")
    return parser
