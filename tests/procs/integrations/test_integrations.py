"""The trainers themselves, two ranks: the bits of a plain run, across the barrier."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT, SCRIPTS

from bytesched.environment import child_environment

TIMEOUT_S = 600.0

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 20)]

WAYS = {
    "accelerate": ["by default", "accumulating", "clipping"],
    "transformers": ["by norm", "accumulating by norm", "logging norms", "Adafactor"],
    "lightning": ["automatic", "manual", "accumulating", "clipping"],
    "fabric": ["by default", "clipping"],
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


@pytest.fixture(scope="module")
def outcomes(python: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of every way, in one pair of interpreters: their imports take longest."""
    folder = tmp_path_factory.mktemp("trainers")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [_start(python, rank, port, folder) for rank in range(2)]
    try:
        codes = [rank.wait(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [(folder / f"{rank}.err").read_text()[-6000:] for rank in range(2)]
    assert codes == [0, 0], said
    # The trainers print their logs there as well.
    lines = (folder / "0.out").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"trainer"')]


def _start(python: str, rank: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # By this Lightning knows that somebody else has started all ranks.
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        # Nothing is fetched: models and data are made.
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / f"{rank}.out").open("w") as out, (folder / f"{rank}.err").open("w") as err:
        return subprocess.Popen(
            [python, str(SCRIPTS / "trainer_cases.py")],
            cwd=ROOT,
            env=child_environment(environment),
            stdout=out,
            stderr=err,
        )


@pytest.mark.parametrize("trainer", WAYS)
def test_trains_as_without_and_crosses(outcomes: list[dict[str, Any]], trainer: str) -> None:
    found = [outcome for outcome in outcomes if outcome["trainer"] == trainer]
    assert [outcome["way"] for outcome in found] == WAYS[trainer]
    for outcome in found:
        assert outcome["ours"] == outcome["plain"], outcome
        assert outcome["figures"]["mode"] == "cross", outcome
    crossed = [outcome["figures"]["barrier_crossed_pct"] for outcome in found]
    # After a norm, little is left to be sent over loopback, now and then nothing.
    always = [pct for way, pct in zip(WAYS[trainer], crossed, strict=True) if way not in CLIPPED]
    assert all(pct > 0 for pct in always), crossed
    assert any(pct > 0 for pct in crossed), crossed
