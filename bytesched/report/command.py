"""`bytesched report`: pictures of traces, of benchmarks and of tunings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bytesched.report.bench import draw_bench
from bytesched.report.iteration import draw_iteration
from bytesched.report.timeline import draw_timeline
from bytesched.tuning.picture import draw_tuning

__all__ = ["draw_bench", "draw_iteration", "draw_timeline", "draw_tuning", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a picture; return 0, or 1 if a file cannot be used."""
    options = _parser().parse_args(argv)
    try:
        if options.picture == "iteration":
            draw_iteration(options.before, options.after, options.output, title=options.title)
        elif options.picture == "timeline":
            draw_timeline(options.trace, options.output, title=options.title, step=options.step)
        elif options.picture == "tuning":
            draw_tuning(options.file, options.output)
        else:
            draw_bench(options.results, options.output)
    except (OSError, ValueError) as error:
        print(f"bytesched report: {error}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bytesched report", description="Draw what was measured.")
    pictures = parser.add_subparsers(dest="picture", required=True, metavar="PICTURE")
    iteration = pictures.add_parser("iteration", help="one iteration of two runs, above each other")
    iteration.add_argument("before", type=Path, metavar="BEFORE.json", help="trace of plain DDP")
    iteration.add_argument("after", type=Path, metavar="AFTER.json", help="trace of bytesched")
    iteration.add_argument("--title", default="An iteration and the forward pass after it")
    timeline = pictures.add_parser("timeline", help="one iteration of all ranks")
    timeline.add_argument("trace", type=Path, metavar="TRACE.json", help="of one rank, or merged")
    timeline.add_argument("--step", type=int, metavar="N", help="default: one of median length")
    timeline.add_argument("--title", default="One iteration")
    bench = pictures.add_parser("bench", help="iteration times of every system, beside T*")
    bench.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    tuning = pictures.add_parser("tuning", help="what a tuning tried; OUT.html: one whole page")
    tuning.add_argument("file", type=Path, metavar="TUNING.json")
    for picture in (iteration, timeline, bench, tuning):
        picture.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.png")
    return parser
