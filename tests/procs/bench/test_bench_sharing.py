"""A small whole run of jobs that share a device."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tiny import TINY
from warm_python import warm_python

QUICK = ["--iterations", "12", "--rounds", "1", "--warmup", "2"]


def test_two_jobs_of_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    arguments = ["--emulate", "tiny.json", "--share", "--workers", "2", "--json", "out.json"]
    done = subprocess.run(
        [warm_python(), "-m", "bytesched", "bench", *arguments, *QUICK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "one after the other" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert [job["name"] for job in found["jobs"]] == ["tiny", "tiny"]
    for arm in found["arms"].values():
        assert arm["same_bits"]
        assert len(arm["rates"][0]) == 2
    for figures in found["arms"]["crossover"]["figures"]:
        assert figures["turns"] >= 6
    assert found["command"].startswith("bytesched bench --emulate")
