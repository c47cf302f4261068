"""torch.distributed: DDP as a shell, and how its ranks come together."""

from __future__ import annotations

from .ddp import find_ddp
from .joining import Joining

__all__ = ["Joining", "find_ddp"]
