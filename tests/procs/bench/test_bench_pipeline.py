"""A small whole run of replicated pipelines."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from warm_python import warm_python

LAYERS = [{"name": n, "forward_ms": 1, "backward_ms": 2, "shapes": [[40, 40]]} for n in "abcd"]
QUICK = ["--iterations", "2", "--rounds", "2", "--warmup", "2"]


def test_all_have_the_bits_of_a_reduction_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps({"name": "tiny", "layers": LAYERS}))
    arguments = [
        "--emulate",
        "tiny.json",
        "--pipeline",
        "2",
        "--workers",
        "4",
        "--micro-batches",
        "4",
        "--json",
        "out.json",
    ]
    done = subprocess.run(
        [warm_python(), "-m", "bytesched", "bench", *arguments, *QUICK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 pipelines of 2 ranks" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert {"1f1b", "interleaved", "zbv"} <= found["schedules"].keys()
    for name, its in found["schedules"].items():
        assert ("ddp" in its["iteration_ms"]) != its["splits_backward"], name
        assert all(its["same_bits"].values()), (name, its["bits"])
        assert all(len(turns) == 2 for turns in its["iteration_ms"].values())
        assert len(its["bound_ms"]) == len(its["end_ms"]) == 2
        for bound_ms, end_ms in zip(its["bound_ms"], its["end_ms"], strict=True):
            assert bound_ms <= end_ms + 1e-6
    assert found["command"].startswith("bytesched bench --emulate")
