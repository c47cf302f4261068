"""Scripts that are left as they are: what they make is seen, and wrapped."""

from __future__ import annotations

from bytesched.plugins.script.kinds import WatchedDdp, WatchedHorovod
from bytesched.plugins.script.watched import Watched

__all__ = ["Watched", "WatchedDdp", "WatchedHorovod"]
