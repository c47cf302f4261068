"""Scripts that are left as they are: what they make is seen, and wrapped."""

from __future__ import annotations

from .kinds import WatchedDdp, WatchedHorovod
from .watched import Watched

__all__ = ["Watched", "WatchedDdp", "WatchedHorovod"]
