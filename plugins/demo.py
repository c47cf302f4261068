"""The demo: ``python -m bytesched.plugins.demo`` trains the same model with and without bytesched.

A small character GPT on two emulated hosts with links of 1 Gbit/s; the batch is chosen such that
computing and sending take about the same time. Ends with the comparison, a trace and a picture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytesched.errors import BytesschedError
from bytesched.lab import Lab
from bytesched.report import draw_iteration

HOSTS = 2
RATE = "1gbit"
WORKER = "bytesched.plugins.demo_worker"
BAR = 24
PLAIN_EVERY = 20


@dataclass
class Run:
    """One way to train the model, and what came of it."""

    name: str
    kind: str
    options: dict[str, str]
    traced: bool = True
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def iteration_ms(self) -> float:
        """Median over the iterations after the first few."""
        times_ms: list[float] = self.result["times_ms"]
        return statistics.median(times_ms)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if the losses of all runs are equal."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--iterations", type=int, default=100, metavar="N")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="FOLDER")
    options = parser.parse_args(argv)
    if options.iterations < 10:
        parser.error("--iterations: at least 10")
    runs = [
        Run("DDP", "ddp", {}),
        Run("DDP, 2 MB buckets", "ddp", {"bucket_mb": "2", "bucket_view": "1"}, traced=False),
        Run("bytesched", "bytesched", {}),
    ]
    try:
        with Lab(HOSTS, RATE) as lab:
            introduce(lab)
            batch = 0
            for run in runs:
                folder = options.output / run.kind if run.traced else None
                run.result = train(lab, run, options.iterations, batch, folder)
                batch = run.result["batch"]
    except (BytesschedError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return conclude(runs, options.output)


def introduce(lab: Lab) -> None:
    """Say what is about to run on what."""
    print("A character GPT learns the sources of Python's standard library, on two hosts.")
    if lab.shaped:
        print(f"The hosts are emulated: {lab.reason}, links of {RATE}/s.\n")
    else:
        print(f"No emulated hosts here ({lab.reason}): two processes, links of unlimited rate,")
        print("so there is little to gain by scheduling.\n")


def train(lab: Lab, run: Run, iterations: int, batch: int, folder: Path | None) -> dict[str, Any]:
    """Train on every host, show how far it is, and return what rank 0 reports."""
    spec = {
        "kind": run.kind,
        "options": run.options,
        "iterations": iterations,
        "batch": batch,
        "trace_folder": str(folder.resolve()) if folder else "",
    }
    environment = {
        "WORLD_SIZE": str(HOSTS),
        "MASTER_ADDR": lab.addresses[0],
        "MASTER_PORT": str(lab.free_port()),
        "GLOO_SOCKET_IFNAME": lab.interface,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    result: dict[str, Any] = {"batch": batch}
    argv = [sys.executable, "-m", WORKER, json.dumps(spec)]
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
                message = json.loads(line)
                result |= message
                if "batch" in message and not batch:
                    size = f"{message['model_bytes'] / 1e6:.1f} MB of gradients"
                    print(f"{size} per iteration, batch of {message['batch']} per host.\n")
                elif 0 < message.get("step", 0) <= iterations:
                    progress(run.name, message, iterations)
        if any(process.wait() for process in processes):
            errors.seek(0)
            tail = "\n".join(errors.read().splitlines()[-15:])
            raise BytesschedError(f"training with {run.name} failed:\n{tail}")
    return result


def progress(name: str, message: dict[str, Any], iterations: int) -> None:
    """A bar on a terminal, a line now and then elsewhere."""
    step = message["step"]
    filled = BAR * step // iterations
    line = (
        f"{name:<18} [{'#' * filled:<{BAR}}] {step:>4}/{iterations}  "
        f"loss {message['loss']:.3f}  {message['ms']:6.1f} ms"
    )
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if step == iterations else "", flush=True)
    elif step % PLAIN_EVERY == 0 or step == iterations:
        print(line, flush=True)


def conclude(runs: list[Run], output: Path) -> int:
    """Print the comparison, draw the picture; 0 if the losses are equal."""
    plain, ours = runs[0], runs[-1]
    equal = all(run.result["losses"] == plain.result["losses"] for run in runs)
    losses = ours.result["losses"]
    count = sum(len(rank) for rank in losses)
    print(f"\nlosses     {'equal, bit for bit' if equal else 'NOT EQUAL'}: ", end="")
    print(f"all {count} of both hosts, the last {losses[0][-1]:.4f}")
    for run in runs:
        gain = plain.iteration_ms / run.iteration_ms
        compared = "" if run is plain else f"   {gain:.2f} x as fast as DDP"
        print(f"{run.iteration_ms:8.1f} ms per iteration   {run.name:<18}{compared}")
    before, after = (output / run.kind / "rank0.trace.json" for run in (plain, ours))
    print(f"trace      {after}  (open it at https://ui.perfetto.dev)")
    picture = output / "iteration.png"
    try:
        draw_iteration(before, after, picture, before_name=plain.name, after_name=ours.name)
        print(f"picture    {picture}")
    except (BytesschedError, OSError, ValueError) as error:
        print(f"picture    not drawn: {error}")
    print("\nAgainst DDP with its best bucket size, FSDP2 and the lower bound:")
    print("  bytesched bench --lab 2 --model gpt")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
