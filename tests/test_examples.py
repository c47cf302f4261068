"""The examples, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bytesched.config import child_environment

ROOT = Path(__file__).parents[1]


def _torchrun(script: str, **variables: str) -> list[str]:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            script,
        ],
        cwd=ROOT,
        env=child_environment({"OMP_NUM_THREADS": "1", **variables}),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.procs
def test_ddp_example_has_the_loss_of_plain_ddp_and_crosses_the_barrier() -> None:
    plain = _torchrun("examples/ddp.py", BYTESCHED_ENABLED="0")
    ours = _torchrun("examples/ddp.py")
    assert plain[0].startswith("loss ")
    assert plain[0] == ours[0]
    figures = dict(line.strip().split(" = ") for line in ours[1:])
    assert figures["mode"] == "cross"
    assert int(figures["barrier_crossed_steps"]) > 10
    assert plain[1:] == ["  mode = plain"]
