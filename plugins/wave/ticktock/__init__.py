"""The waves of one rank: forward passes beside backward passes."""

from __future__ import annotations

from .activations import ActivationMemory
from .ticktock import TickTock

__all__ = ["ActivationMemory", "TickTock"]
