"""The trainers themselves, two ranks each: the bits of a plain run, across the barrier."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import ROOT, SCRIPTS

from bytesched.environment import child_environment

TIMEOUT_S = 240.0

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 20)]

WAYS = {
    "lightning": ["automatic", "manual", "accumulating", "clipping"],
    "transformers": ["by norm", "accumulating by norm", "logging norms", "Adafactor"],
    "accelerate": ["by default", "accumulating", "clipping"],
}
#: ways that ask for norms, in which every all-reduce is split
CLIPPED = ["clipping", "by norm", "accumulating by norm", "logging norms", "Adafactor"]


@pytest.fixture(scope="module")
def python() -> str:
    """The Python that has the trainers."""
    script = ROOT / "scripts" / "trainers-venv"
    found = subprocess.run(
        [script, "--find", sys.executable], capture_output=True, text=True, timeout=60, check=False
    )
    if found.returncode:
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()


@pytest.mark.parametrize("trainer", WAYS)
def test_trains_as_without_and_crosses(python: str, trainer: str) -> None:
    ended = subprocess.run(
        [
            *(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(SCRIPTS / "trainer_cases.py"), trainer),
        ],
        cwd=ROOT,
        env=child_environment(
            {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": str(ROOT),
                # Nothing is fetched: models and data are made.
                "HF_HUB_OFFLINE": "1",
            }
        ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    # The trainer prints its logs there as well.
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"way"')]
    outcomes = [json.loads(line) for line in lines]
    assert [outcome["way"] for outcome in outcomes] == WAYS[trainer]
    for outcome in outcomes:
        assert outcome["ours"] == outcome["plain"], outcome
        assert outcome["figures"]["mode"] == "cross", outcome
    crossed = [outcome["figures"]["barrier_crossed_pct"] for outcome in outcomes]
    # After a norm, little is left to be sent over loopback, now and then nothing.
    always = [pct for way, pct in zip(WAYS[trainer], crossed, strict=True) if way not in CLIPPED]
    assert all(pct > 0 for pct in always), crossed
    assert any(pct > 0 for pct in crossed), crossed
