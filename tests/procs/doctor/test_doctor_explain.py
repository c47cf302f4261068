"""A script's first steps explained, as a user would have it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

from bytesched.environment import child_environment
from bytesched.lab.ports import free_port

pytestmark = pytest.mark.procs

TIMEOUT_S = 250.0

SCRIPT = """\
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]))
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
while True:
    optimizer.zero_grad()
    model(torch.randn(4, 256)).square().mean().backward()
    float(model.module[0].weight.grad.std())
    optimizer.step()
"""


def test_each_line_that_waits_is_named_with_a_cure(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = free_port()
    ranks = [
        subprocess.Popen(
            [
                *(warm_python(), "-m", "bytesched", "doctor", "--steps", "6"),
                *("--explain", str(script), "0.001"),
            ],
            cwd=tmp_path,
            env=child_environment(
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                }
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    (told, _), (nothing, _) = ended
    assert nothing == ""
    assert told.startswith("mode cross: ")
    # Of six steps one is the warm-up, and one comes before the first vote.
    assert "4 iterations" in told.splitlines()[0]
    line = SCRIPT[: SCRIPT.index("    float(")].count("\n") + 1
    assert f"the script reads gradients of module.0.weight (train.py:{line})" in told
    assert "    do:  log every hundredth step" in told
