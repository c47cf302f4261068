"""Small whole runs of the bench with layers of experts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

from bytesched.bench.systems import EXCHANGE_SYSTEMS
from bytesched.commands import bench

EXPERTS = {
    "name": "experts",
    "layers": [
        {"name": "in", "forward_ms": 1, "backward_ms": 2, "shapes": [[64, 64]]},
        {"forward_ms": 2, "backward_ms": 4, "shapes": [], "exchange_bytes": 40000},
        {"name": "out", "forward_ms": 1, "backward_ms": 2, "shapes": [[64, 64], [64]]},
    ],
}
ITERATIONS, ROUNDS, RANKS = 2, 2, 2


@pytest.mark.nightly
def test_all_systems_train_the_same_and_time_all_to_alls(tmp_path: Path) -> None:
    (tmp_path / "experts.json").write_text(json.dumps(EXPERTS))
    numbers = f"--workers {RANKS} --iterations {ITERATIONS} --rounds {ROUNDS} --warmup 3"
    done = subprocess.run(
        [
            *(warm_python(), "-m", "bytesched", "bench", "--emulate", "experts.json"),
            *(*numbers.split(), "--json", "out.json"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert tuple(result["systems"]) == EXCHANGE_SYSTEMS
    compute = result["compute"]
    assert compute["optimum_ms"] >= compute["pieces_optimum_ms"] >= compute["compute_ms"] == 12
    for name, system in result["systems"].items():
        expected = "of its rank alone" if name == "idle" else "identical"
        assert system["losses"] == expected, name
        figures = system["figures"]
        # A piece that has come meanwhile is waited for in no time.
        assert 0 <= figures["exchange_p50_ms"] <= figures["exchange_p95_ms"]
        # Two of them in either pass, of which bytesched-pieces cuts each.
        count = 4 * (4 if name == "bytesched-pieces" else 1)
        for turn in system["rounds"]:
            assert len(turn["exchange_ms"]) == RANKS * ITERATIONS * count
    stats = result["systems"]["bytesched"]["rounds"][0]["stats"]
    assert stats["urgent_sections"] > 0
    assert not result["systems"]["bytesched-no-lane"]["rounds"][0]["stats"]["urgent_sections"]
    assert result["systems"]["idle"]["figures"]["exchange_p95_to_idle"] == 1
    assert "x idle" in done.stdout


def test_experts_have_no_gradients_to_send(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = [{"forward_ms": 1, "backward_ms": 1, "shapes": [[4]], "exchange_bytes": 8}]
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"layers": layers}))
    with pytest.raises(SystemExit):
        bench.main(["--emulate", str(path)])
    assert "layer 0: no shapes beside exchange_bytes" in capsys.readouterr().err
