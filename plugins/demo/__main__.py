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
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytesched.errors import BytesschedError
from bytesched.lab.hosts import Lab
from bytesched.records import to_json
from bytesched.report.iteration import draw_iteration

from .specification import DemoSpecification, Trained

HOSTS = 2
RATE = "250mbit"
WORKER = "bytesched.plugins.demo.rank"
#: No further turn begins after this time; set-up and traces come on top.
TRAIN_S = 110.0
BAR = 16


@dataclass
class Run:
    """One way to train the model, and what came of it."""

    name: str
    kind: str
    options: dict[str, str] = field(default_factory=dict)
    traced: bool = True
    losses: list[list[float]] = field(default_factory=list)
    iteration_ms: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if the losses of all runs are equal."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="FOLDER")
    options = parser.parse_args(argv)
    if options.steps < 10:
        parser.error("--steps: at least 10")
    runs = [
        Run("DDP", "ddp"),
        Run("DDP, 1 MB buckets", "ddp", {"bucket_mb": "1", "bucket_view": "1"}, traced=False),
        Run("bytesched", "bytesched"),
    ]
    try:
        with Lab(HOSTS, RATE) as lab:
            introduce(lab)
            finished = train(lab, runs, options)
    except (BytesschedError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    for run, message in zip(runs, finished, strict=True):
        run.losses = message["losses"]
        run.iteration_ms = statistics.median(message["times_ms"])
    return conclude(runs, options.output)


def introduce(lab: Lab) -> None:
    """Say what is about to run on what."""
    print("A character GPT learns the sources of Python's standard library, on two hosts.")
    if lab.shaped:
        print(
            f"The hosts are emulated: {lab.reason}, links of {RATE}/s: so slow that two cores are"
        )
        print("enough to compute and to send for both.")
    else:
        print(f"No emulated hosts here ({lab.reason}): two processes, links of unlimited rate,")
        print("so there is little to gain by scheduling.")


def train(lab: Lab, runs: list[Run], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train on every host, show how far it is, and return what rank 0 reports of each run."""
    spec = DemoSpecification(
        runs=tuple(
            Trained(
                kind=run.kind,
                options=run.options,
                trace_folder=str((options.output / run.kind).resolve()) if run.traced else "",
            )
            for run in runs
        ),
        steps=options.steps,
        train_s=TRAIN_S,
    )
    finished = []
    for message in messages(lab, [sys.executable, "-m", WORKER, to_json(spec)]):
        if "batch" in message:
            size = f"{message['model_bytes'] / 1e6:.1f} MB of gradients"
            print(
                f"{size} per iteration, batch of {message['batch']} per host. Turns of 10 steps:\n"
            )
        elif "step" in message:
            progress(runs, message, options.steps)
        else:
            finished.append(message)
    return finished


def messages(lab: Lab, argv: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run the ranks, yield what rank 0 reports, and raise if one fails."""
    environment = {
        "WORLD_SIZE": str(HOSTS),
        "MASTER_ADDR": lab.addresses[0],
        "MASTER_PORT": str(lab.free_port()),
        "GLOO_SOCKET_IFNAME": lab.interface,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            lab.launch(
                rank,
                argv,
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
            )
            for rank in range(HOSTS)
        ]
        assert processes[0].stdout is not None
        with processes[0].stdout as lines:
            for line in lines:
                yield json.loads(line)
        codes = [process.wait() for process in processes]
        if any(codes):
            errors.seek(0)
            tail = "\n".join(errors.read().splitlines()[-15:])
            raise BytesschedError(f"the training failed:\n{tail}")


def progress(runs: list[Run], message: dict[str, Any], steps: int) -> None:
    """One line that grows on a terminal, a line for each turn elsewhere."""
    step = message["step"]
    filled = min(BAR, BAR * step // steps)
    figures = [
        f"{run.name} {each['ms']:.0f} ms loss {each['loss']:.4f}"
        for run, each in zip(runs, message["runs"], strict=True)
    ]
    line = f"[{'#' * filled:<{BAR}}] {step:>3}  {'  '.join(figures)}"
    if sys.stdout.isatty():
        print(f"\r{line}", end="", flush=True)
    else:
        print(line, flush=True)


def conclude(runs: list[Run], output: Path) -> int:
    """Print the comparison, draw the picture; 0 if the losses are equal."""
    plain, ours = runs[0], runs[-1]
    equal = all(run.losses == plain.losses for run in runs)
    count = sum(map(len, ours.losses))
    print(f"\n\nlosses     {'equal, bit for bit' if equal else 'NOT EQUAL'}: ", end="")
    print(f"all {count} of both hosts, the last {ours.losses[0][-1]:.4f}")
    for run in runs:
        gain = plain.iteration_ms / run.iteration_ms
        compared = "" if run is plain else f"{gain:.2f} x as fast as DDP"
        print(f"{run.iteration_ms:8.1f} ms per iteration   {run.name:<18} {compared}".rstrip())
    before, after = (output / run.kind / "rank0.trace.json" for run in (plain, ours))
    print(f"trace      {after}  (open it at https://ui.perfetto.dev)")
    picture = output / "iteration.png"
    try:
        draw_iteration(before, after, picture, before_name=plain.name, after_name=ours.name)
        print(f"picture    {picture}")
    except (BytesschedError, OSError, ValueError) as error:
        print(f"picture    not drawn: {error}")
    print("\nYour own script, unchanged:")
    print("  torchrun --nproc-per-node 2 -m bytesched run train.py")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
