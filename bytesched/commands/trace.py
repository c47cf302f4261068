"""`bytesched trace`: the timelines of all ranks on one clock, or summed up."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from bytesched.files import write_text
from bytesched.parser import CommandParser
from bytesched.table import aligned
from bytesched.trace.reading import Iteration, merge_traces, read_traces
from bytesched.trace.timeline import trace_name

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `bytesched trace`; return the exit code, 1 if there was nothing to use."""
    parser = CommandParser(prog="bytesched trace", description="Merge timelines, or sum them up.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    merge = commands.add_parser("merge", help="put all ranks into one file, on one clock")
    merge.add_argument("paths", nargs="+", type=Path, metavar="DIR|FILE")
    merge.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.json")
    merge.set_defaults(run=_merge)
    summary = commands.add_parser(
        "summary", help="print the means of each rank, and the slowest steps"
    )
    summary.add_argument("path", type=Path, metavar="FILE", help="of one rank, or merged")
    summary.add_argument(
        "--slowest", type=_count, default=5, metavar="N", help="how many (%(default)s)"
    )
    summary.add_argument("--all", action="store_true", help="print every step of every rank")
    summary.set_defaults(run=_summary)
    options = parser.parse_args(argv)
    return int(options.run(options))


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 0 or more")
    return int(text)


def _merge(options: argparse.Namespace) -> int:
    paths: list[Path] = []
    for path in options.paths:
        # By length first: rank 10 comes after rank 9.
        inside = sorted(path.glob(trace_name("*")), key=lambda file: (len(file.name), file.name))
        paths += inside if path.is_dir() else [path]
        if path.is_dir() and not inside:
            _complain(f"{path}: holds no {trace_name('*')}")
    events, complaints = merge_traces(paths)
    for complaint in complaints:
        _complain(complaint)
    if not events:
        _complain("nothing to merge")
        return 1
    try:
        write_text(options.output, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        _complain(f"cannot write {options.output}: {error.strerror or error}")
        return 1
    ranks = len({event.get("pid") for event in events})
    print(f"{options.output}: {ranks} ranks, {len(events)} events; open it in ui.perfetto.dev")
    return 0


def _summary(options: argparse.Namespace) -> int:
    try:
        traces = read_traces(options.path)
    except (OSError, ValueError) as error:
        _complain(str(error))
        return 1
    iterations = {trace.rank: trace.iterations() for trace in traces}
    found = [(rank, one) for rank, of_rank in iterations.items() for one in of_rank]
    if not found:
        _complain(f"{options.path}: holds no whole iteration, which takes two steps")
        return 1
    if options.all:
        _print("every step", found)
        return 0
    means = [(str(rank), f"{len(ones)} steps", *_means(ones)) for rank, ones in iterations.items()]
    print("means of each rank")
    print(*aligned([_TITLES, *means], _SIDES), sep="\n")
    slowest = sorted(found, key=lambda step: -step[1].step_ms)[: options.slowest]
    if slowest:
        print()
        _print("the slowest steps", slowest)
    print(_LEGEND)
    return 0


_TITLES = ("rank", "step", "step ms", "link busy ms", "exposed wait ms", "crossed ms")
_SIDES = ">>>>>>"
_LEGEND = """
link busy: something was being sent. exposed wait: training waited for the link.
crossed: the link was busy before backward began, with gradients of the step before."""


def _print(title: str, steps: Sequence[tuple[int, Iteration]]) -> None:
    rows = [(str(rank), str(one.step), *_means([one])) for rank, one in steps]
    print(title, *aligned([_TITLES, *rows], _SIDES), sep="\n")


def _means(ones: Sequence[Iteration]) -> list[str]:
    """Means of the times of some iterations, as text; nothing if there are none."""
    times = [(one.step_ms, one.link_busy_ms, one.exposed_wait_ms, one.crossed_ms) for one in ones]
    return [f"{fmean(column):.2f}" for column in zip(*times, strict=True)] or [""] * 4


def _complain(line: str) -> None:
    print(f"bytesched trace: {line}", file=sys.stderr)
