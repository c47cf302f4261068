"""A rank on a GPU dies or stops in the middle: the other one says so, at once or in time."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from cuda_tests import ON_CUDA
from gpu_faults import trains_until
from ranks import run_fresh

pytestmark = ON_CUDA

# Beyond the limit of the run, so that no wait can help itself.
NO_TIMEOUT_S = 300.0
LIMIT_S = 100.0


@pytest.mark.parametrize(
    ("moment", "fields"),
    [
        ("in forward", {}),
        ("in backward", {}),
        ("after step", {}),
        ("in backward", {"shard": True}),
    ],
    ids=str,
)
def test_a_killed_rank_is_told_at_once(moment: str, fields: dict[str, Any]) -> None:
    args = (moment, int(signal.SIGKILL), {**fields, "timeout_s": NO_TIMEOUT_S})
    survivor, killed = run_fresh(trains_until, timeout_s=LIMIT_S, args=args)
    assert killed.code == -signal.SIGKILL, killed
    assert survivor.stdout.startswith("PeerLost: "), survivor
    assert survivor.code == 1, survivor


def test_a_stopped_rank_is_told_in_time() -> None:
    args = ("in backward", int(signal.SIGSTOP), {"timeout_s": 4.0})
    survivor, stopped = run_fresh(trains_until, timeout_s=LIMIT_S, args=args)
    assert stopped.code == -signal.SIGKILL, stopped
    assert survivor.stdout.startswith(("SchedulerTimeout: ", "PeerLost: ")), survivor
    assert survivor.code == 1, survivor
