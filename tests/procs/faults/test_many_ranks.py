"""Sixteen ranks: they start, stay equal, and every one names the rank that was killed.

Their all-reduces are whole, with and without clipping, or the first half of a sharded update.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

RANKS = 16


@pytest.mark.timeout(600)
def test_sixteen_ranks_train_alike_and_name_the_one_that_dies(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    script: list[str | Path] = [
        sys.executable,
        ROOT / "scripts" / "many-ranks",
        "--ranks",
        str(RANKS),
    ]
    ended = subprocess.run(
        [*script, "--iterations", "3", "--timeout-s", "90", "--json", figures],
        capture_output=True,
        text=True,
        timeout=580.0,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    plain, *wrapped = json.loads(figures.read_text())
    assert [ours["system"] for ours in wrapped] == ["whole", "clipped", "sharded"]
    for found in (plain, *wrapped):
        assert len(found["weights"]) == 1
    for ours in wrapped:
        assert ours["death"]["errors"] == ["PeerLost"]
        assert ours["death"]["named"] == ours["death"]["of"] == RANKS - 1
