"""Results of the bench, as ranks write them: without figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def bench_result(medians_ms: Mapping[str, Sequence[float]], **fields: Any) -> dict[str, Any]:
    """Of systems with these medians, one for each round."""
    turn = {"cpu_ms": 30.0, "losses": [[3.0, 2.0], [3.5, 2.5]], "weights": ["a", "a"], "stats": {}}
    return {
        "workload": "tiny",
        "network": "loopback",
        "emulated": True,
        "world_size": 2,
        "gradient_bytes_per_s": 100e6,
        "compute": {
            "model_bytes": 10**7,
            "tensors": 3,
            "compute_ms": 80.0,
            "compute_alone_ms": 81.0,
            "communication_ms": 100.0,
            "optimum_ms": 120.0,
            "sharded_optimum_ms": 136.0,
            "update_ms": 4.0,
        },
        "systems": {
            name: {"rounds": [turn | {"iteration_ms": [ms - 1, ms, ms + 1]} for ms in rounds]}
            for name, rounds in medians_ms.items()
        },
        **fields,
    }
