"""What is predicted stays near what was measured in the lab."""

from __future__ import annotations

import re
import subprocess
import sys

from paths import ROOT


def test_predictions_are_within_five_percent_of_the_results() -> None:
    """Every row of the first table in docs/results.md, each with three systems."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "calibrate-sim"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [abs(float(error)) for error in re.findall(r"\(([+-][\d.]+) %\)", done.stdout)]
    assert len(found) == 18
    assert max(found) < 5.0
