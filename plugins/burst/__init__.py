"""Bursts: runs the plans of `bytesched.burst`, and another job in the gaps that they leave."""

from .background import Background
from .branched import Branched
from .record import record
from .runtime import Burst
from .structure import plan_for

__all__ = ["Background", "Branched", "Burst", "plan_for", "record"]
