"""torch.distributed: groups of our own, one order on all ranks, DDP as a shell."""

from __future__ import annotations

from bytesched.plugins.c10d.backend import C10dBackend
from bytesched.plugins.c10d.ddp import find_ddp
from bytesched.plugins.c10d.group import Group
from bytesched.plugins.c10d.joining import Joining

__all__ = ["C10dBackend", "Group", "Joining", "find_ddp"]
