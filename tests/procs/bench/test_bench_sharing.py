"""A small whole run of jobs that share a device."""

from __future__ import annotations

import pytest
from small_benches import Bench

SHARE = ("--emulate", "tiny.json", "--share", "--workers", "2")


@pytest.mark.nightly
def test_too_few_iterations_are_refused_before_anything_is_measured(bench: Bench) -> None:
    done = bench.run(*SHARE, "--iterations", "3")
    assert done.returncode != 0
    assert "--iterations 3: with --share at least 4" in done.stderr
    assert "round" not in done.stdout


def test_two_jobs_of_two_ranks(bench: Bench) -> None:
    found = bench.result(*SHARE, "--iterations", "12", "--rounds", "1", "--warmup", "2")
    assert "one after the other" in found["stdout"]
    assert [job["name"] for job in found["jobs"]] == ["tiny", "tiny"]
    for arm in found["arms"].values():
        assert arm["same_bits"]
        assert len(arm["rates"][0]) == 2
    for figures in found["arms"]["crossover"]["figures"]:
        assert figures["turns"] >= 6
    assert found["command"].startswith("bytesched bench --emulate")
