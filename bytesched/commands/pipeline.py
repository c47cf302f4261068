"""`bytesched pipeline`: an order of work for pipeline parallelism, for torch to run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bytesched.errors import ConfigError, PluginError
from bytesched.lab.hosts import parse_rate
from bytesched.parser import CommandParser, Option, read_by, within
from bytesched.pipeline.order import Order
from bytesched.pipeline.replay import Timeline, replay
from bytesched.pipeline.report import draw, lines
from bytesched.pipeline.search import search
from bytesched.pipeline.stages import (
    PLACEMENTS,
    Link,
    Pipeline,
    Stage,
    cut,
    load_chain,
    placed,
    read_placement,
)
from bytesched.values import parse_size

EPILOG: Final = """\
  bytesched pipeline plan --profile vgg --ranks 4 --placement v --micro-batches 8 \\
      --split-backward -o order.csv
"""
_OF_A_STAGE: Final = "--profile takes a file with a list of stages, which may be alike"
REPLACED: Final = {
    "--activation": _OF_A_STAGE,
    "--backward-ms": _OF_A_STAGE,
    "--bandwidth": "it is --rate",
    "--csv": "it is -o FILE.csv",
    "--forward-ms": _OF_A_STAGE,
    "--microbatches": "it is --micro-batches",
    "--parameters": _OF_A_STAGE,
    "--png": "it is -o FILE.png",
}
#: as many as a search goes through in time
MOST_ACTIONS: Final = 6000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when that went well."""
    options = _parser().parse_args(argv)
    chain = load_chain(options.profile)
    pipeline = _pipeline(options, chain)
    missing = _missing(pipeline)
    if options.memory is not None and "activation_bytes" in missing:
        raise ConfigError(
            "--memory: no stage holds activations: say how much in a profile that lists stages"
        )
    known = dict(_torch_orders(options))
    found = search(
        pipeline,
        options.micro_batches,
        memory_bytes=options.memory,
        split_backward=options.split_backward,
        time_limit_s=options.time_limit_s,
        known=[order for order in known.values() if isinstance(order, Order)],
    )
    others = {name: _other(options, chain, order) for name, order in known.items()}
    print("\n".join(lines(found, others, options.memory)))
    if missing:
        print(f"not known of the stages, and counted as nothing: {', '.join(missing)}")
    for ending, file in options.output:
        if ending == "csv":
            found.order.write(file)
        else:
            title = (
                f"{options.micro_batches} micro-batches on {options.ranks} ranks: "
                f"{found.timeline.end_s * 1e3:.1f} ms, {found.timeline.bubble_share:.0%} bubbles"
            )
            draw(found.timeline, title, Path(file))
        print(f"{ending}: {file}")
    return 0


def _pipeline(options: argparse.Namespace, chain: tuple[Stage, ...]) -> Pipeline:
    if options.placement in PLACEMENTS:
        stage_ranks = placed(options.placement, options.ranks, options.stages_per_rank)
    else:
        stage_ranks = read_placement(options.placement, options.ranks)
    actions = 3 * len(stage_ranks) * options.micro_batches
    if actions > MOST_ACTIONS:
        raise ConfigError(
            f"{len(stage_ranks)} stages and {options.micro_batches} micro-batches are {actions} "
            f"actions, more than the {MOST_ACTIONS} that are searched"
        )
    return _on(stage_ranks, options, chain)


def _missing(pipeline: Pipeline) -> list[str]:
    """Which sizes no stage has."""
    names = ("activation_bytes", "output_bytes", "parameter_bytes")
    return [name for name in names if not any(getattr(s, name) for s in pipeline.stages)]


def _on(
    stage_ranks: tuple[int, ...], options: argparse.Namespace, chain: tuple[Stage, ...]
) -> Pipeline:
    """The model in as many stages."""
    link = Link(options.rate / 8, options.latency_us / 1e6)
    return Pipeline(cut(chain, len(stage_ranks)), stage_ranks, link, options.replicas)


def _torch_orders(options: argparse.Namespace) -> Iterator[tuple[str, Order | str]]:
    """By name, the orders that torch has for so many ranks and micro-batches, or why none."""
    try:
        from bytesched.plugins.pipelines.orders import SCHEDULES, torch_order
    except ImportError:
        return
    for name, placement in SCHEDULES.items():
        per_rank = {"single": 1, "v": 2}.get(placement, max(2, options.stages_per_rank))
        try:
            yield name, torch_order(name, options.ranks, per_rank, options.micro_batches)
        except ImportError:
            yield name, f"{name}: torch is not installed"
        except (ConfigError, PluginError) as error:
            yield name, f"no {name}: {error}"


def _other(
    options: argparse.Namespace, chain: tuple[Stage, ...], order: Order | str
) -> Timeline | str:
    if isinstance(order, str):
        return order
    try:
        return replay(order, _on(order.stage_ranks, options, chain))
    except ConfigError as error:
        return f"no {order.origin.removeprefix('torch' + chr(39) + 's ')}: {error}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="bytesched pipeline",
        description="Find an order of work for pipeline parallelism that torch runs as it is.",
        epilog=EPILOG,
        replaced=REPLACED,
    )
    parser.add_argument("verb", choices=("plan",), help="the order that ends first within a memory")
    parser.add_argument(
        "--profile",
        required=True,
        metavar="P",
        help="of `bytesched bench`: a name or file; or one with stages",
    )
    parser.add_options(
        (
            Option("--ranks", "N", within(1, 64), 4, "ranks of the pipeline (4)"),
            Option(
                *("--placement", "HOW", str, "v"),
                "v (there and back), interleaved (in rounds), or a JSON file with the rank of each "
                "stage (v)",
            ),
            Option("--stages-per-rank", "K", within(1, 16), 2, "stages on each rank (2)"),
            Option("--micro-batches", "N", within(1, 256), 8, "of a batch (8)"),
            Option(
                *("--memory", "SIZE", read_by(parse_size), None),
                "of activations on a rank, at most (default: no limit)",
            ),
            Option("--rate", "RATE", read_by(parse_rate), "10gbit", "each rank's link (10gbit)"),
            Option("--latency-us", "US", within(0.0, 1e6), 50.0, "of a message (50)"),
            Option("--replicas", "R", within(1, 1 << 20), 1, "copies of the pipeline (1)"),
            Option("--time-limit-s", "S", within(0.1, 86400.0), 20.0, "of the whole search (20)"),
        )
    )
    parser.add_outputs(csv="the order, for torch", png="a picture of its timeline")
    parser.add_argument(
        "--split-backward", action="store_true", help="compute gradients of weights later"
    )
    return parser
