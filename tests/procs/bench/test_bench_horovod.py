"""Small whole runs of the bench with Horovod."""

from __future__ import annotations

from pathlib import Path

import pytest
from horovod_launched import Kind, why_missing
from ranks import HOROVOD
from small_benches import ONCE, Bench, losses
from tiny import TINY_TO_SEND

from bytesched.lab.hosts import Lab

needs_gloo, needs_mpi = map(pytest.mark.usefixtures, ("gloo", "mpi"))

pytestmark = pytest.mark.needs("horovod")


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
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path, HOROVOD)
    made.write("tiny.json", TINY_TO_SEND)
    return made


ON_TWO = ("--emulate", "tiny.json", *ONCE)


@needs_gloo
@pytest.mark.nightly
def test_over_gloo_on_loopback(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    unwanted = bench.folder / "unwanted.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(unwanted))
    sized = "bytesched-horovod:partition_bytes=256KiB"
    result = bench.result(*ON_TWO, "--systems", f"ddp,horovod,{sized}")
    assert result["network"] == "loopback, Horovod over Gloo"
    assert set(losses(result).values()) == {"identical"}
    for system in result["systems"].values():
        assert len(system["rounds"][0]["iteration_ms"]) == 2
    ours = result["systems"][sized]["rounds"][0]["stats"]
    assert ours["mode"] == "cross"
    assert ours["partition_bytes"] == 256 << 10
    assert not unwanted.exists()


@pytest.mark.nightly
@needs_gloo
def test_a_failing_rank_ends_the_bench_and_is_quoted(bench: Bench) -> None:
    done = bench.run("--emulate", "tiny.json", "--systems", "bytesched-horovod:policy=fofo")
    assert done.returncode
    assert "no policy 'fofo'" in done.stderr
    assert "bytesched-horovod ended with exit code 1" in done.stderr


@pytest.mark.nightly
@needs_mpi
@pytest.mark.slow
def test_over_mpi_on_loopback(bench: Bench) -> None:
    systems = "ddp,horovod:cycle_ms=2,bytesched-horovod"
    result = bench.result(*ON_TWO, "--controller", "mpi", "--systems", systems)
    assert result["network"] == "loopback, Horovod over MPI"
    assert set(losses(result).values()) == {"identical"}


@pytest.mark.nightly
@pytest.mark.lab
@needs_gloo
def test_the_bytes_cross_the_links_of_the_lab(bench: Bench) -> None:
    with Lab(2, "200mbit") as lab:
        if not lab.shaped:
            pytest.skip(f"no network namespaces here: {lab.reason}")
    options = ["--emulate", "tiny.json", "--lab", "2", "--rate", "200mbit", *ONCE]
    result = bench.result(*options, "--systems", "ddp,horovod,bytesched-horovod")
    assert set(losses(result).values()) == {"identical"}
    least_ms = 1e3 * result["compute"]["model_bytes"] / (200e6 / 8)
    for name, system in result["systems"].items():
        assert system["figures"]["iteration_ms"] > 0.8 * least_ms, name
