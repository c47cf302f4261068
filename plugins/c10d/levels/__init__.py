"""Sums in two levels, within hosts and between them, where ranks share hosts."""

from bytesched.plugins.c10d.levels.choosing import open_levels
from bytesched.plugins.c10d.levels.sums import TwoLevelSums, Under
from bytesched.plugins.c10d.levels.transport import TwoLevelTransport

__all__ = ["TwoLevelSums", "TwoLevelTransport", "Under", "open_levels"]
