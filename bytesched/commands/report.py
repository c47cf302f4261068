"""`bytesched report`: what is in files of a timeline, the bench or the tuner."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from bytesched.bench.picture import draw_bench
from bytesched.files import write_text
from bytesched.parser import CommandParser
from bytesched.report.iteration import draw_iteration
from bytesched.report.shares import shares_of
from bytesched.table import aligned
from bytesched.trace.reading import (
    Event,
    Iteration,
    Trace,
    load_events,
    merge_traces,
    read_traces,
    traces_of,
)
from bytesched.trace.timeline import trace_name
from bytesched.tuning.file import TuningFile
from bytesched.values import size_text

_EPILOG = """\
of timelines, the folder or files that BYTESCHED_TIMELINE names:
  report RUN                       means of each rank, and the slowest steps
  report RUN -o OUT.json           all ranks on one clock, for ui.perfetto.dev
  report BEFORE AFTER -o OUT.png   one iteration of two runs of the same rank
of others:
  report RESULT... -o OUT.png      files of bench --json: iteration times, beside T*
  report TUNING                    a file of the tuner: the settings that were tried

The two runs of a script: once so that it sends in the order of backward and
updates everything at once, as DDP does, and once as it is.
  BYTESCHED_TIMELINE=runs/before BYTESCHED_POLICY=fifo BYTESCHED_CROSS_BARRIER=0 \\
      torchrun --nproc-per-node 2 -m bytesched run train.py
  BYTESCHED_TIMELINE=runs/after torchrun --nproc-per-node 2 -m bytesched run train.py
  bytesched report runs/before runs/after -o both.png
"""
_TITLES = ("rank", "step", "step ms", "link busy ms", "exposed wait ms", "crossed ms")
_SLOWEST = 5
_LEGEND = """
link busy: something was being sent. exposed wait: training waited for the link.
crossed: the link was busy before backward began, with gradients of the step before."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print, merge or draw what the files hold; return 0, or 1 if one cannot be used."""
    parser = CommandParser(
        prog="bytesched report",
        description="Print, merge or draw what files hold.",
        epilog=_EPILOG,
        replaced={"--slowest": "--all prints every step"},
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|DIR")
    parser.add_outputs(json="timelines on one clock", png="a picture")
    parser.add_argument("--all", action="store_true", help="print every step of every rank")
    options = parser.parse_args(argv)
    try:
        for kind, output in options.output or [("", "")]:
            _report(options.paths, kind, Path(output), print_all=options.all)
            if output:
                print(output)
    except ValueError as error:
        _complain(str(error))
        return 1
    return 0


def _report(paths: Sequence[Path], kind: str, output: Path, *, print_all: bool) -> None:
    """Print what the files hold, or write it: as "json", or "png"."""
    fields = _fields(paths[0])
    if "trials" in fields:
        if kind:
            raise ValueError("a tuning is printed: leave out -o")
        _print_tunings(paths)
        return
    if "systems" in fields:
        if kind != "png":
            raise ValueError("results of the bench are drawn: -o OUT.png")
        draw_bench(paths, output)
        return
    runs = [_files(path) for path in paths]
    files = [file for run in runs for file in run]
    if kind == "json":
        _merge(files, output)
    elif not kind:
        traces = _read(files[0]) if len(files) == 1 else traces_of(_merged(files))
        _print_traces(traces, print_all=print_all)
    elif len(runs) == 2 and len({read_traces(run[0])[0].rank for run in runs}) == 1:
        draw_iteration(runs[0][0], runs[1][0], output)
    else:
        raise ValueError(
            "a picture is of two runs of a rank; of all ranks: -o OUT.json, for ui.perfetto.dev"
        )


def _fields(path: Path) -> dict[str, object]:
    """What stands in a file at the top; nothing for timelines, whose reader says what is wrong."""
    try:
        text = path.read_bytes()
        return dict(json.loads(text)) if text.startswith(b"{") else {}
    except (OSError, ValueError):
        return {}


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    # By length first: rank 10 comes after rank 9.
    inside = sorted(path.glob(trace_name("*")), key=lambda file: (len(file.name), file.name))
    if not inside:
        raise ValueError(f"{path}: holds no {trace_name('*')}")
    return inside


def _read(file: Path) -> list[Trace]:
    """The ranks of one file, which may be merged already."""
    traces = read_traces(file)
    if not load_events(file)[1]:
        _complain(f"{file}: cut off; what comes before the cut is used")
    return traces


def _merged(files: Sequence[Path]) -> list[Event]:
    events, complaints = merge_traces(files)
    for complaint in complaints:
        _complain(complaint)
    if not events:
        raise ValueError("nothing to merge")
    return events


def _merge(files: Sequence[Path], output: Path) -> None:
    events = _merged(files)
    write_text(output, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    ranks = len({event.get("pid") for event in events})
    print(f"{ranks} ranks, {len(events)} events; open it in ui.perfetto.dev")


def _print_traces(traces: Sequence[Trace], *, print_all: bool) -> None:
    found = [(trace.rank, one) for trace in traces for one in trace.iterations()]
    if not found:
        raise ValueError("the trace holds no whole iteration, which takes two steps")
    if print_all:
        _print_steps("every step", found)
        return
    means = [(trace.rank, trace.iterations()) for trace in traces]
    rows = [(str(rank), f"{len(ones)} steps", *_means(ones)) for rank, ones in means]
    _print_table("means of each rank", _TITLES, rows)
    if graphs := [trace for trace in traces if trace.track("graph")]:
        shares = [shares_of(trace) for trace in graphs]
        rows = [
            (str(trace.rank), *(f"{part:.1%}" for part in parts.values()))
            for trace, parts in zip(graphs, shares, strict=True)
        ]
        _print_table("\nwhat an epoch goes to", ("rank", *shares[0]), rows)
    slowest = sorted(found, key=lambda step: -step[1].step_ms)[:_SLOWEST]
    _print_steps("\nthe slowest steps", slowest)
    print(_LEGEND)


def _print_steps(title: str, steps: Sequence[tuple[int, Iteration]]) -> None:
    rows = [(str(rank), str(one.step), *_means([one])) for rank, one in steps]
    _print_table(title, _TITLES, rows)


def _means(ones: Sequence[Iteration]) -> list[str]:
    """Means of the times of some iterations, as text; nothing if there are none."""
    times = [(one.step_ms, one.link_busy_ms, one.exposed_wait_ms, one.crossed_ms) for one in ones]
    return [f"{fmean(column):.2f}" for column in zip(*times, strict=True)] or [""] * 4


def _print_tunings(paths: Sequence[Path]) -> None:
    """Of those that are none is said so at the end."""
    faults: list[str] = []
    for path in paths:
        try:
            tuning = TuningFile.read(path)
        except (OSError, ValueError) as error:
            faults.append(f"{path}: {error}")
            continue
        rows = [
            (one.phase, str(one.setting), f"{one.step_ms:.1f}", str(len(one.durations_ms)), cut)
            for one, cut in ((one, "cut short" if one.cut else "") for one in tuning.trials)
        ]
        case, size = tuning.fingerprint, size_text(tuning.fingerprint.model_bytes)
        print(
            f"{case.backend}, {sum(case.ranks_per_host)} ranks on "
            f"{len(case.ranks_per_host)} hosts, {case.device}, a model of {size}"
        )
        found = f"{tuning.setting}, {tuning.step_ms:.1f} ms ({tuning.gain_pct:.1f} % gained)"
        titles = ("phase", "setting", "step ms", "steps", "")
        _print_table(f"{path}: {found}", titles, rows, "<<>><")
    if faults:
        raise ValueError("; ".join(faults))


def _print_table(
    title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], sides: str = ""
) -> None:
    print(title, *aligned([titles, *rows], sides or ">" * len(titles)), sep="\n")


def _complain(line: str) -> None:
    print(f"bytesched report: {line}", file=sys.stderr)
