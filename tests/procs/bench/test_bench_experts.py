"""Small whole runs of the bench with layers of experts."""

from __future__ import annotations

import pytest
from small_benches import Bench

from bytesched.bench.systems import EXCHANGE_SYSTEMS

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
def test_all_systems_train_the_same_and_time_all_to_alls(bench: Bench) -> None:
    bench.write("experts.json", EXPERTS)
    numbers = f"--iterations {ITERATIONS} --rounds {ROUNDS} --warmup 3"
    result = bench.result("--emulate", "experts.json", *numbers.split())
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
    assert "x idle" in result["stdout"]


def test_experts_have_no_gradients_to_send(bench: Bench) -> None:
    layers = [{"forward_ms": 1, "backward_ms": 1, "shapes": [[4]], "exchange_bytes": 8}]
    bench.write("wrong.json", {"layers": layers})
    said = bench.run("--emulate", "wrong.json").stderr
    assert "layer 0: no shapes beside exchange_bytes" in said
