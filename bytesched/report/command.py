"""`bytesched report`: pictures of traces, and those that other packages add."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from bytesched.report.iteration import draw_iteration
from bytesched.report.pictures import PICTURES, Picture
from bytesched.report.timeline import draw_timeline

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a picture; return 0, or 1 if a file cannot be used."""
    parser = argparse.ArgumentParser(prog="bytesched report", description="Draw what was measured.")
    pictures = parser.add_subparsers(dest="picture", required=True, metavar="PICTURE")
    for name, picture in PICTURES.items():
        one = pictures.add_parser(name, help=picture.line)
        picture.add_arguments(one)
        one.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.png")
    options = parser.parse_args(argv)
    try:
        PICTURES[options.picture].draw(options)
    except (OSError, ValueError) as error:
        print(f"bytesched report: {error}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


def _iteration_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="BEFORE.json", help="trace of plain DDP")
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


PICTURES["iteration"] = Picture(
    "one iteration of two runs, above each other", _iteration_arguments, _draw_iteration
)
PICTURES["timeline"] = Picture("one iteration of all ranks", _timeline_arguments, _draw_timeline)
