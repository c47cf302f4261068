"""`bytesched pipeline`: an order of work for pipeline parallelism, for torch to run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bytesched.errors import ConfigError, PluginError
from bytesched.lab.hosts import parse_rate
from bytesched.parser import CommandParser
from bytesched.pipeline.inputs import PLACEMENTS, load_chain, placed, read_placement
from bytesched.pipeline.order import Order
from bytesched.pipeline.replay import Timeline, replay
from bytesched.pipeline.report import draw, lines
from bytesched.pipeline.search import Found, search
from bytesched.pipeline.stages import Link, Pipeline, Stage, cut
from bytesched.values import parse_size

__all__ = ["main"]

EPILOG = """\
  bytesched pipeline plan --profile vgg --ranks 4 --placement v --microbatches 8 \\
      --split-backward --csv order.csv
  bytesched pipeline plan --forward-ms 1 --backward-ms 2 --activation 4MB --memory 16MB
"""
MOST_RANKS = 64
MOST_MICRO_BATCHES = 256
#: flags that describe stages where there is no profile
OF_A_STAGE = ("forward_ms", "backward_ms", "activation", "output", "parameters")
#: as many as a search goes through in time
MOST_ACTIONS = 6000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when that went well, 1 if a file cannot be written."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        _check(options)
        chain = _chain(options)
        pipeline = _pipeline(options, chain)
        memory_bytes = _size(options.memory, "memory") if options.memory else None
        if memory_bytes is not None and "activation_bytes" in _missing(pipeline):
            where = "in a profile that lists stages" if options.profile else "with --activation"
            raise ConfigError(f"--memory: no stage holds activations: say how much {where}")
    except ConfigError as error:
        parser.error(str(error))
    known = dict(_torch_orders(options))
    found = search(
        pipeline,
        options.microbatches,
        memory_bytes=memory_bytes,
        split_backward=options.split_backward,
        time_limit_s=options.time_limit_s,
        known=[order for order in known.values() if isinstance(order, Order)],
    )
    others = {name: _other(options, chain, order) for name, order in known.items()}
    print("\n".join(lines(found, others, memory_bytes)))
    if missing := _missing(pipeline):
        print(f"not known of the stages, and counted as nothing: {', '.join(missing)}")
    try:
        _write(options, found)
    except OSError as error:
        why = f"{error.filename or ''}: {error.strerror or error}"
        print(f"bytesched pipeline: cannot write {why}", file=sys.stderr)
        return 1
    return 0


def _write(options: argparse.Namespace, found: Found) -> None:
    if options.csv:
        found.order.write(options.csv)
        print(f"csv: {options.csv}")
    if options.png:
        title = (
            f"{options.microbatches} micro-batches on {options.ranks} ranks: "
            f"{found.timeline.end_s * 1e3:.1f} ms, {found.timeline.bubble_share:.0%} bubbles"
        )
        draw(found.timeline, title, Path(options.png))
        print(f"png: {options.png}")


def _check(options: argparse.Namespace) -> None:
    for name, most in (
        ("ranks", MOST_RANKS),
        ("microbatches", MOST_MICRO_BATCHES),
        ("stages_per_rank", 16),
        ("replicas", 1 << 20),
    ):
        value = getattr(options, name)
        if not 1 <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: from 1 to {most}")
    if not 0.1 <= options.time_limit_s <= 86400:
        raise ConfigError(f"--time-limit-s {options.time_limit_s:g}: from 0.1 to 86400")
    if not 0 <= options.latency_us <= 1e6:
        raise ConfigError(f"--latency-us {options.latency_us:g}: from 0 to 1000000")
    for name in ("csv", "png"):
        path = getattr(options, name)
        if path and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder")
        if path and Path(path).is_dir():
            raise ConfigError(f"--{name} {path}: it is a folder")
    given = [name for name in OF_A_STAGE if getattr(options, name) is not None]
    if options.profile and given:
        flag = given[0].replace("_", "-")
        raise ConfigError(f"--{flag} beside --profile: the profile says that of its stages")
    if not options.profile and options.forward_ms is None:
        raise ConfigError("expected --profile, or --forward-ms and --backward-ms of a stage")


def _chain(options: argparse.Namespace) -> tuple[Stage, ...] | None:
    """The layers of the profile; None: all stages are alike, whatever their number."""
    if options.profile:
        return load_chain(options.profile)
    for name in ("forward_ms", "backward_ms"):
        value = getattr(options, name)
        if value is None or not 0 < value <= 1e6:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value}: of a stage, above 0 and up to 1000000 ms")
    return None


def _pipeline(options: argparse.Namespace, chain: tuple[Stage, ...] | None) -> Pipeline:
    if options.placement in PLACEMENTS:
        stage_ranks = placed(options.placement, options.ranks, options.stages_per_rank)
    else:
        stage_ranks = read_placement(options.placement, options.ranks)
    actions = 3 * len(stage_ranks) * options.microbatches
    if actions > MOST_ACTIONS:
        raise ConfigError(
            f"{len(stage_ranks)} stages and {options.microbatches} micro-batches are {actions} "
            f"actions, more than the {MOST_ACTIONS} that are searched"
        )
    return _on(stage_ranks, options, chain, len(stage_ranks))


def _missing(pipeline: Pipeline) -> list[str]:
    """Which sizes no stage has."""
    names = ("activation_bytes", "output_bytes", "parameter_bytes")
    return [name for name in names if not any(getattr(s, name) for s in pipeline.stages)]


def _on(
    stage_ranks: tuple[int, ...],
    options: argparse.Namespace,
    chain: tuple[Stage, ...] | None,
    alike: int,
) -> Pipeline:
    """The model in as many stages; without a profile, ``alike`` of those that flags describe."""
    if chain is None:
        sizes = (_size(getattr(options, name) or "0", name) for name in OF_A_STAGE[2:])
        half_s = options.backward_ms / 2e3
        chain = (Stage(options.forward_ms / 1e3, half_s, half_s, *sizes),) * alike
        if alike % len(stage_ranks):
            raise ConfigError(f"{alike} stages do not become {len(stage_ranks)} equal ones")
    link = Link(parse_rate(options.bandwidth) / 8, options.latency_us / 1e6)
    return Pipeline(cut(chain, len(stage_ranks)), stage_ranks, link, options.replicas)


def _size(text: str, flag: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--{flag} {text}: {error}") from None


def _torch_orders(options: argparse.Namespace) -> Iterator[tuple[str, Order | str]]:
    """By name, the orders that torch has for so many ranks and micro-batches, or why none."""
    try:
        from bytesched.plugins.pipelines.orders import SCHEDULES, torch_order
    except ImportError:
        return
    for name, placement in SCHEDULES.items():
        per_rank = {"single": 1, "v": 2}.get(placement, max(2, options.stages_per_rank))
        try:
            yield name, torch_order(name, options.ranks, per_rank, options.microbatches)
        except ImportError:
            yield name, f"{name}: torch is not installed"
        except (ConfigError, PluginError) as error:
            yield name, f"no {name}: {error}"


def _other(
    options: argparse.Namespace, chain: tuple[Stage, ...] | None, order: Order | str
) -> Timeline | str:
    if isinstance(order, str):
        return order
    alike = options.ranks * options.stages_per_rank
    try:
        return replay(order, _on(order.stage_ranks, options, chain, alike))
    except ConfigError as error:
        return f"no {order.origin.removeprefix('torch' + chr(39) + 's ')}: {error}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="bytesched pipeline",
        description="Find an order of work for pipeline parallelism that torch runs as it is.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    plan = verbs.add_parser(
        "plan",
        help="the order that ends first within a memory",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = plan.add_argument
    add("--profile", metavar="P", help="of `bytesched bench`: a name or file; or one with stages")
    add("--forward-ms", type=float, metavar="MS", help="of a stage, where there is no profile")
    add("--backward-ms", type=float, metavar="MS", help="of a stage, likewise")
    add("--activation", metavar="SIZE", help="what it holds of a micro-batch")
    add("--output", metavar="SIZE", help="what it hands to the next stage")
    add("--parameters", metavar="SIZE", help="of its weights")
    add("--ranks", type=int, default=4, metavar="N", help="(default %(default)s)")
    add(
        "--placement",
        default="v",
        metavar="HOW",
        help="v (there and back), interleaved (in rounds), or a JSON file with the rank of each "
        "stage (default %(default)s)",
    )
    add("--stages-per-rank", type=int, default=2, metavar="K", help="(default %(default)s)")
    add("--microbatches", type=int, default=8, metavar="N", help="(default %(default)s)")
    add("--memory", metavar="SIZE", help="of activations on a rank, at most (default: no limit)")
    add("--bandwidth", default="10gbit", metavar="RATE", help="of a rank's link (%(default)s)")
    add("--latency-us", type=float, default=50.0, metavar="US", help="of a message (%(default)s)")
    add("--replicas", type=int, default=1, metavar="R", help="copies of the pipeline (%(default)s)")
    add("--split-backward", action="store_true", help="compute gradients of weights later")
    add("--csv", metavar="FILE", help="write the order, for torch")
    add("--png", metavar="FILE", help="write a picture of its timeline")
    add(
        "--time-limit-s",
        type=float,
        default=20.0,
        metavar="S",
        help="of the whole search (default %(default)s)",
    )
    return parser
