"""The waves of one rank: forward passes beside backward passes."""

from __future__ import annotations

from bytesched.plugins.wave.ticktock.activations import ActivationMemory
from bytesched.plugins.wave.ticktock.ticktock import TickTock

__all__ = ["ActivationMemory", "TickTock"]
