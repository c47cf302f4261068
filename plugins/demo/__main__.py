"""The demo: ``python -m bytesched.plugins.demo`` trains the same model with and without bytesched.

A small character GPT on two emulated hosts. The link is slow enough that two cores can compute for
both hosts and send at the same time, as the cores of real hosts can; the batch is chosen such that
computing and sending take about the same time. Of 1, 2 and 4 MB, buckets of 1 MB are DDP's best
here. Ends with the table of the bench, two traces and a picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bytesched.bench.provenance import command_of
from bytesched.bench.specification import bench_parser, specification
from bytesched.commands.bench import measure_systems
from bytesched.environment import rank_view
from bytesched.errors import BytesschedError
from bytesched.report.iteration import draw_iteration

_RATE: Final = "250mbit"
#: those with a timeline, and its folder
_TRACED: Final = {"ddp:bucket_mb=1+bucket_view=1": "ddp", "bytesched": "bytesched"}
_BENCH: Final = (
    *("--lab", "2", "--rate", _RATE, "--model", "bytesched.plugins.demo.model:character_gpt"),
    *("--systems", ",".join(["ddp", *_TRACED]), "--rounds", "2", "--warmup", "4"),
)


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
        f"emulated here if that is allowed, with links of {_RATE}/s: so slow that two cores are\n"
        "enough to compute and to send for both.",
        flush=True,
    )
    output: Path = options.output
    command = [*_BENCH, "--iterations", str(options.steps // 2)]
    command += ["--json", str(output / "result.json")]
    try:
        output.mkdir(parents=True, exist_ok=True)
        spec = specification(bench_parser().parse_args(command), rank_view())
        for system in spec.systems:
            if folder := _TRACED.get(system.label):
                system.options["timeline"] = str((output / folder).resolve())
        result = measure_systems(spec, rank_view(), command_of(command))
        assert result is not None
    except (BytesschedError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if result["network"] == "loopback":
        print("\nhosts cannot be emulated here, and without a slow link little is gained")
    before, after = (output / folder / "rank0.trace.json" for folder in _TRACED.values())
    print(f"trace: {after}  (open it at https://ui.perfetto.dev)")
    picture = output / "iteration.png"
    try:
        draw_iteration(before, after, picture, before_name="DDP with its best buckets")
        print(f"picture: {picture}")
    except (BytesschedError, OSError, ValueError) as error:
        print(f"picture: not drawn: {error}")
    print("\nYour own script, unchanged:")
    print("  torchrun --nproc-per-node 2 -m bytesched run train.py")
    return int(any(its["losses"] != "identical" for its in result["systems"].values()))


if __name__ == "__main__":
    sys.exit(main())
