"""Trainers, and optimizers of other packages: the bits of a plain run, across the barrier."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builds import python_with
from paths import ROOT, SCRIPTS

from bytesched.environment import child_environment
from bytesched.lab.hosts import Lab
from bytesched.plugins.update.separable import KNOWN

#: of each link, where there are emulated hosts: over loopback, what follows a norm may have come
RATE = "200mbit"
TIMEOUT_S = 600.0

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(TIMEOUT_S + 20)]

WAYS = {
    "accelerate": ["by default", "accumulating", "clipping"],
    "transformers": ["by norm", "accumulating by norm", "logging norms", "Adafactor"],
    "lightning": ["automatic", "manual", "accumulating", "clipping"],
    "fabric": ["by default", "clipping"],
}
#: ways that ask for norms, in which every all-reduce is split
CLIPPED = ["clipping", "by norm", "accumulating by norm", "logging norms", "Adafactor"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2, RATE) as lab:
        yield lab


@pytest.fixture(scope="module")
def outcomes(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of every way, in one pair of interpreters: their imports take longest."""
    folder = tmp_path_factory.mktemp("trainers")
    port = str(lab.free_port())
    ranks = [_start(lab, rank, port, folder) for rank in range(2)]
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


def _start(lab: Lab, rank: int, port: str, folder: Path) -> subprocess.Popen[str]:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": lab.addresses[0],
        "MASTER_PORT": port,
        # By this Lightning knows that somebody else has started all ranks.
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": lab.interface,
        "PYTHONPATH": str(ROOT),
        # What is asked is what the plan does, however fast it is here.
        "BYTESCHED_GUARD": "0",
        # Nothing is fetched: models and data are made.
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / f"{rank}.out").open("w") as out, (folder / f"{rank}.err").open("w") as err:
        command = [python_with("trainers"), str(SCRIPTS / "trainer_cases.py")]
        return lab.launch(rank, command, environment, stdout=out, stderr=err)


@pytest.mark.parametrize("trainer", WAYS)
def test_trains_as_without_and_crosses(outcomes: list[dict[str, Any]], trainer: str) -> None:
    found = [outcome for outcome in outcomes if outcome["trainer"] == trainer]
    assert [outcome["way"] for outcome in found] == WAYS[trainer]
    for outcome in found:
        assert outcome["ours"] == outcome["plain"], outcome
        assert outcome["figures"]["mode"] == "cross", outcome
        if outcome["way"] in CLIPPED:
            # How much then crosses depends on how busy the machine is.
            assert outcome["figures"]["order"] == "halves", outcome
        else:
            assert outcome["figures"]["barrier_crossed_pct"] > 0, outcome


def test_known_optimizers_of_other_packages_have_the_bits_of_plain_training_deferred() -> None:
    """All of them in one interpreter, whose imports take longest."""
    trained = subprocess.run(
        [python_with("trainers"), str(SCRIPTS / "known_optimizers.py")],
        env=child_environment({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr[-6000:]
    outcomes = [json.loads(line) for line in trained.stdout.splitlines()]
    assert {outcome["name"] for outcome in outcomes} == KNOWN.keys()
    assert [outcome for outcome in outcomes if outcome["wrong"]] == []
