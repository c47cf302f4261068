"""Two emulated hosts, plain and scheduled, in a minute: what is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["OURS", "PLAIN", "RUNS", "Demo"]

PLAIN, OURS = "DDP", "bytesched"
#: by the name that each is shown under: the system, and its options
RUNS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    PLAIN: ("ddp", {}),
    "DDP, 1 MB buckets": ("ddp", {"bucket_mb": "1", "bucket_view": "1"}),
    OURS: ("bytesched", {}),
}


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What every rank of the demo gets."""

    steps: int
    #: for timelines, each in a folder of its system
    folder: str
    #: after which no turn is begun; set-up and traces come on top
    train_s: float = 110.0
    #: for one collective
    timeout_s: float = 120.0
