"""A small whole run of jobs that share a device."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tiny import TINY
from warm_python import warm_python

QUICK = ["--iterations", "12", "--rounds", "1", "--warmup", "2"]


def share(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    arguments = ["--emulate", "tiny.json", "--share", "--workers", "2", "--json", "out.json"]
    return subprocess.run(
        [warm_python(), "-m", "bytesched", "bench", *arguments, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.nightly
def test_too_few_iterations_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    done = share(tmp_path, "--iterations", "3")
    assert done.returncode != 0
    assert "--iterations 3: with --share at least 4" in done.stderr
    assert "round" not in done.stdout


def test_two_jobs_of_two_ranks(tmp_path: Path) -> None:
    done = share(tmp_path, *QUICK)
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
