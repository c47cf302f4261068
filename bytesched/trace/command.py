"""`bytesched trace`: the timelines of all ranks on one clock, or summed up."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bytesched.files import write_text
from bytesched.table import aligned
from bytesched.trace.reading import merge_traces, read_traces
from bytesched.trace.timeline import trace_name

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `bytesched trace`; return the exit code, 1 if there was nothing to use."""
    parser = argparse.ArgumentParser(prog="bytesched trace", description="Read timelines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    merge = commands.add_parser("merge", help="put all ranks into one file, on one clock")
    merge.add_argument("paths", nargs="+", type=Path, metavar="DIR|FILE")
    merge.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.json")
    merge.set_defaults(run=_merge)
    summary = commands.add_parser("summary", help="print a table of the iterations")
    summary.add_argument("path", type=Path, metavar="FILE", help="of one rank, or merged")
    summary.set_defaults(run=_summary)
    options = parser.parse_args(argv)
    return int(options.run(options))


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
    found = False
    for trace in traces:
        rows: list[tuple[str, ...]] = [
            ("step", "step_ms", "link_busy_ms", "exposed_wait_ms", "crossed")
        ]
        for iteration in trace.iterations():
            found = True
            times = (iteration.step_ms, iteration.link_busy_ms, iteration.exposed_wait_ms)
            crossed = f"yes, {iteration.crossed_ms:.1f} ms" if iteration.crossed_ms else "no"
            rows.append((str(iteration.step), *(f"{value:.2f}" for value in times), crossed))
        print(f"rank {trace.rank}", *aligned(rows, ">>>><"), sep="\n")
    if not found:
        _complain(f"{options.path}: holds no whole iteration, which takes two steps")
    return 0 if found else 1


def _complain(line: str) -> None:
    print(f"bytesched trace: {line}", file=sys.stderr)
