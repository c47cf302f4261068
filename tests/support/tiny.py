"""Models so small that a bench of them takes no time."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "name": "tiny",
    "description": "for tests",
    "layers": [
        {"name": "first", "forward_ms": 1, "backward_ms": 2, "shapes": [[64, 64], [64]]},
        {"name": "second", "forward_ms": 1.5, "backward_ms": 2, "shapes": []},
        {"name": "third", "forward_ms": 1, "backward_ms": 3, "shapes": [[64, 256]]},
    ],
}
#: with a layer of 4 MiB
TINY_TO_SEND = {
    **TINY,
    "layers": [
        TINY["layers"][0],
        {"name": "second", "forward_ms": 1, "backward_ms": 2, "shapes": [[1024, 1024]]},
        TINY["layers"][2],
    ],
}
