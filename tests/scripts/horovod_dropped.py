"""Models under Horovod that are dropped without unwrap, and what of them stays behind."""

from __future__ import annotations

import dropped_models
from horovod_training import HorovodJob


def dropped_in_turn(count: int, reads: bool) -> list[str]:
    """`dropped_models.dropped_in_turn` on Horovod."""
    return dropped_models.dropped_in_turn(count, reads, HorovodJob)
