"""What nothing shows once training goes on: it is said as it begins."""

from __future__ import annotations

from typing import Final

#: as soon as values may be missing
UNSEEN: Final = (
    "reads of weights and gradients wait for them, except torch.tensor(weight), x.data = weight, "
    "type(weight), C++ code, a GPU stream that is new, kept optimizer state that was loaded or is "
    "from before wrap, and, with AdamA, what else has the memory of weights or "
    "states: call bytesched.flush() before these (docs/reference/limits.md#what-no-read-shows)"
)
#: of more than two ranks, where chunks are not DDP's buckets
ROUNDING: Final = "sums may round as with other buckets than DDP's"
