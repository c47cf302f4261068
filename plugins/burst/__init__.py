"""Bursts: runs the plans of `bytesched.burst`, and another job in the gaps that they leave."""

from .background import Background
from .record import record
from .runtime import Burst
from .structure import Branched, plan_for

__all__ = ["Background", "Branched", "Burst", "plan_for", "record"]
