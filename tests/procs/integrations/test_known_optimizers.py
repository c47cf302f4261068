"""Optimizers of other packages that are known: the bits of a plain run, updated after step()."""

from __future__ import annotations

import json
import subprocess

import pytest
from builds import python_with
from paths import ROOT, SCRIPTS

from bytesched.environment import child_environment
from bytesched.plugins.update.separable import KNOWN

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(320), pytest.mark.nightly]


def test_each_has_the_bits_of_plain_training_and_is_deferred() -> None:
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
    assert [outcome for outcome in outcomes if outcome["error"]] == []
