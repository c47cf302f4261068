"""Bursts: runs the plans of `bytesched.burst`, and another job in the gaps that they leave."""

from bytesched.plugins.burst.background import Background
from bytesched.plugins.burst.branched import Branched
from bytesched.plugins.burst.record import record
from bytesched.plugins.burst.runtime import Burst
from bytesched.plugins.burst.structure import plan_for

__all__ = ["Background", "Branched", "Burst", "plan_for", "record"]
