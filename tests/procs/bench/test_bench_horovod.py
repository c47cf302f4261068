"""Small whole runs of the bench with Horovod."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from horovod_launched import Kind, why_missing
from ranks import HOROVOD
from tiny import TINY_TO_SEND
from warm_python import warm_python

from bytesched.lab.hosts import Lab

needs_gloo, needs_mpi = map(pytest.mark.usefixtures, ("gloo", "mpi"))

#: below the limit of a test
TIMEOUT_S = 250.0
pytestmark = pytest.mark.needs("horovod")
QUICK = ["--iterations", "2", "--rounds", "2", "--warmup", "3", "--sweep-iterations", "1"]


@pytest.fixture
def gloo() -> None:
    skip_without("gloo")


@pytest.fixture
def mpi() -> None:
    skip_without("mpi")


def skip_without(kind: Kind) -> None:
    if reason := why_missing(kind):
        pytest.skip(reason)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY_TO_SEND))
    return str(path)


def run_bench(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [
            warm_python(*HOROVOD),
            "-m",
            "bytesched",
            "bench",
            *arguments,
            "--json",
            "out.json",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return result | {"stdout": done.stdout}


@needs_gloo
@pytest.mark.nightly
def test_over_gloo_on_loopback(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "unwanted.json"))
    systems = "ddp,horovod,bytesched-horovod:partition_bytes=256KiB"
    result = run_bench(
        tmp_path,
        *("--emulate", tiny, "--workers", "2", "--systems", systems, *QUICK, "--rounds", "1"),
    )
    assert result["network"] == "loopback, Horovod over Gloo"
    for name, system in result["systems"].items():
        assert system["losses"] == "identical", name
        assert len(system["rounds"][0]["iteration_ms"]) == 2
        assert name == "ddp" or system["rounds"][0]["local_size"] == 2
    ours = result["systems"]["bytesched-horovod:partition_bytes=256KiB"]["rounds"][0]["stats"]
    assert ours["mode"] == "cross"
    assert ours["partition_bytes"] == 256 << 10
    assert not (tmp_path / "unwanted.json").exists()


@pytest.mark.nightly
@needs_gloo
def test_a_failing_rank_ends_the_bench_and_is_quoted(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        run_bench(tmp_path, "--emulate", tiny, "--systems", "bytesched-horovod:policy=fofo")
    assert "no policy 'fofo'" in str(failed.value)
    assert "bytesched-horovod ended with exit code 1" in str(failed.value)


@pytest.mark.nightly
@needs_mpi
@pytest.mark.slow
def test_over_mpi_on_loopback(tiny: str, tmp_path: Path) -> None:
    result = run_bench(
        tmp_path,
        *("--emulate", tiny, "--workers", "2", "--controller", "mpi", *QUICK, "--rounds", "1"),
        *("--systems", "ddp,horovod:cycle_ms=2,bytesched-horovod"),
    )
    assert result["network"] == "loopback, Horovod over MPI"
    for name, system in result["systems"].items():
        assert system["losses"] == "identical", name


@pytest.mark.nightly
@pytest.mark.lab
@needs_gloo
def test_the_bytes_cross_the_links_of_the_lab(tiny: str, tmp_path: Path) -> None:
    with Lab(2, "200mbit") as lab:
        if not lab.shaped:
            pytest.skip(f"no network namespaces here: {lab.reason}")
    result = run_bench(
        tmp_path,
        *("--emulate", tiny, "--lab", "2", "--rate", "200mbit"),
        *("--systems", "ddp,horovod,bytesched-horovod", *QUICK, "--rounds", "1"),
    )
    least_ms = 1e3 * result["compute"]["model_bytes"] / (200e6 / 8)
    for name, system in result["systems"].items():
        assert system["losses"] == "identical", name
        assert system["figures"]["iteration_ms"] > 0.8 * least_ms, name
        assert name == "ddp" or system["rounds"][0]["local_size"] == 1
