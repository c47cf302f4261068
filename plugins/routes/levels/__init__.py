"""Sums in two levels, within hosts and between them, where ranks share hosts."""

from .choosing import open_levels
from .sums import PendingSum, TwoLevelSums
from .two_levels import TwoLevelTransport

__all__ = ["PendingSum", "TwoLevelSums", "TwoLevelTransport", "open_levels"]
