"""The demo: ``python -m bytesched.plugins.demo`` trains the same model with and without bytesched.

A small character GPT on two emulated hosts. The link is slow enough that two cores can compute for
both hosts and send at the same time, as the cores of real hosts can; the batch is chosen such that
computing and sending take about the same time. Of 1, 2 and 4 MB, buckets of 1 MB are DDP's best
here. Plain DDP and bytesched train in turns, a few steps each, so that both meet the same moods of
the machine. Ends with the comparison, a trace and a picture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytesched.errors import BytesschedError
from bytesched.lab.ranks import found_by
from bytesched.report.iteration import draw_iteration

from . import OURS, PLAIN, RUNS, Demo

HOSTS = 2
RATE = "250mbit"
WORKER = "bytesched.plugins.demo.rank"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if the losses of all runs are equal."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="FOLDER")
    options = parser.parse_args(argv)
    if options.steps < 10:
        parser.error("--steps: at least 10")
    print(
        "A character GPT learns the sources of Python's standard library, on two hosts that are\n"
        f"emulated here if that is allowed, with links of {RATE}/s: so slow that two cores are\n"
        "enough to compute and to send for both.",
        flush=True,
    )
    demo = Demo(steps=options.steps, folder=str(options.output.resolve()))
    try:
        found, network = found_by(demo, WORKER, HOSTS, RATE, threads=1)
    except (BytesschedError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return conclude(json.loads(found), network, options.output)


def conclude(found: dict[str, Any], network: str, output: Path) -> int:
    """Print the comparison, draw the picture; 0 if the losses are equal."""
    losses = {name: run["losses"] for name, run in found.items()}
    equal = all(each == losses[PLAIN] for each in losses.values())
    count, last = sum(map(len, losses[OURS])), losses[OURS][0][-1]
    print(f"\nlosses     {'equal, bit for bit' if equal else 'NOT EQUAL'}: ", end="")
    print(f"all {count} of both hosts, the last {last:.4f}")
    times_ms = {name: statistics.median(run["times_ms"]) for name, run in found.items()}
    for name, each_ms in times_ms.items():
        compared = "" if name == PLAIN else f"{times_ms[PLAIN] / each_ms:.2f} x as fast as DDP"
        print(f"{each_ms:8.1f} ms per iteration   {name:<18} {compared}".rstrip())
    print(f"network    {network}")
    if network == "loopback":
        print("           hosts cannot be emulated here, and without a slow link little is gained")
    before, after = (output / RUNS[name][0] / "rank0.trace.json" for name in (PLAIN, OURS))
    print(f"trace      {after}  (open it at https://ui.perfetto.dev)")
    picture = output / "iteration.png"
    try:
        draw_iteration(before, after, picture)
        print(f"picture    {picture}")
    except (BytesschedError, OSError, ValueError) as error:
        print(f"picture    not drawn: {error}")
    print("\nYour own script, unchanged:")
    print("  torchrun --nproc-per-node 2 -m bytesched run train.py")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
