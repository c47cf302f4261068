"""Sums in two levels, within hosts and between them, where ranks share hosts."""

from .choosing import open_levels
from .sums import TwoLevelSum, TwoLevelSums

__all__ = ["TwoLevelSum", "TwoLevelSums", "open_levels"]
