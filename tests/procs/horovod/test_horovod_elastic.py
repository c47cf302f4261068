"""Elastic Horovod for real: a rank is killed, training goes on with fewer and again with more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import SCRIPTS

SCRIPT = SCRIPTS / "elastic_script.py"


def trained_alone(steps: int) -> torch.Tensor:
    """The weights of the script's model after `steps`, in one process and without Horovod."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(32, 32) for _ in range(5)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for batch in range(steps):
        generator = torch.Generator().manual_seed(batch)
        loss = model(torch.randn(8, 32, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])[::97]


@pytest.mark.nightly
def test_a_rank_dies_and_another_comes(hvd_gloo: Callable[[int], Any], tmp_path: Path) -> None:
    from horovod_launched import run_fresh_horovod

    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)
    ended = run_fresh_horovod(
        SCRIPT,
        "gloo",
        3,
        timeout_s=240,
        env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "15"},
        args=(tmp_path,),
        launcher_args=[
            *("--min-np", "2", "--max-np", "3"),
            *("--host-discovery-script", str(hosts), "--blacklist-cooldown-range", "2", "3"),
        ],
    )
    reports = [
        json.loads(line)
        for rank in ended.ranks
        for line in rank.stdout.splitlines()
        if line.startswith("{")
    ]
    assert len(reports) == 3, [(rank.code, rank.stderr[-2000:]) for rank in ended.ranks]
    histories = sorted(report["sizes"] for report in reports)
    survived = [[3, "cross"], [2, "cross"], [3, "cross"]]
    assert histories == sorted([survived, survived, [[3, "cross"]]])
    for report in reports:
        expected = trained_alone(report["batch"])
        torch.testing.assert_close(torch.tensor(report["weights"]), expected, rtol=1e-4, atol=1e-6)
