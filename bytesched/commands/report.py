"""`bytesched report`: pictures of traces, and those that other packages add."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from bytesched.parser import CommandParser
from bytesched.report.iteration import draw_iteration
from bytesched.report.pictures import PICTURES, Picture
from bytesched.report.shares import KINDS, draw_shares, read_shares
from bytesched.report.timeline import draw_timeline
from bytesched.table import aligned

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a picture; return 0, or 1 if a file cannot be used."""
    parser = CommandParser(prog="bytesched report", description="Draw what was measured.")
    pictures = parser.add_subparsers(dest="picture", required=True, metavar="PICTURE")
    for name, picture in PICTURES.items():
        one = pictures.add_parser(
            name,
            help=picture.line,
            epilog=picture.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        picture.add_arguments(one)
        one.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.png")
    options = parser.parse_args(argv)
    try:
        PICTURES[options.picture].draw(options)
    except (OSError, ValueError) as error:
        print(f"bytesched report: {error}", file=sys.stderr)
        if PICTURES[options.picture].epilog:
            how = f"bytesched report {options.picture} --help says how to get its files"
            print(f"bytesched report: {how}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


_TWO_TRACES = """\
How to get the two traces of a script: run it twice under bytesched, first so that it sends in the
order of backward and updates everything at once, as DDP does, and then as it is.

  BYTESCHED_TIMELINE=runs/before BYTESCHED_POLICY=fifo BYTESCHED_CROSS_BARRIER=0 \\
      torchrun --nproc-per-node 2 -m bytesched run train.py
  BYTESCHED_TIMELINE=runs/after torchrun --nproc-per-node 2 -m bytesched run train.py
  bytesched report iteration runs/before/rank0.trace.json runs/after/rank0.trace.json -o both.png
"""


def _iteration_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="BEFORE.json", help="trace of a run as DDP's")
    parser.add_argument("after", type=Path, metavar="AFTER.json", help="trace of bytesched")
    parser.add_argument("--title", default="An iteration and the forward pass after it")


def _draw_iteration(options: Namespace) -> None:
    draw_iteration(options.before, options.after, options.output, title=options.title)


def _timeline_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE.json", help="of one rank, or merged")
    parser.add_argument("--step", type=int, metavar="N", help="default: one of median length")
    parser.add_argument("--title", default="One iteration")


def _draw_timeline(options: Namespace) -> None:
    draw_timeline(options.trace, options.output, title=options.title, step=options.step)


_GRAPH = """\
How to get the traces: train with layers of bytesched.plugins.graphs and bytesched.wrap.

  BYTESCHED_TIMELINE=runs torchrun --nproc-per-node 2 examples/gcn_halo.py
  bytesched report graph runs/rank*.trace.json -o graph.png

The printed table has the mean of all epochs. Halo and weights are what training waited for, and
what it took to hand rows over; "on its way" is how long halos were, whatever was computed then.
"""


def _graph_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE.json", help="of some ranks")
    parser.add_argument("--title", default="What an epoch goes to")


def _draw_graph(options: Namespace) -> None:
    ranks = read_shares(options.traces)
    draw_shares([(f"rank {one.rank}", one) for one in ranks], options.output, title=options.title)
    rows: list[tuple[str, ...]] = [("rank", "epochs", "ms", *KINDS, "on its way")]
    for one in ranks:
        shares = (f"{share:.1%}" for share in (*one.of.values(), one.under_way))
        rows.append((str(one.rank), str(one.epochs), f"{one.epoch_ms:.1f}", *shares))
    print(*aligned(rows, ">" * len(rows[0])), sep="\n")


PICTURES["graph"] = Picture(
    "what epochs of full-graph training go to, and the shares as a table",
    _graph_arguments,
    _draw_graph,
    _GRAPH,
)
PICTURES["iteration"] = Picture(
    "one iteration of two runs, above each other",
    _iteration_arguments,
    _draw_iteration,
    _TWO_TRACES,
)
PICTURES["timeline"] = Picture("one iteration of all ranks", _timeline_arguments, _draw_timeline)
