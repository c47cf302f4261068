"""Where gradients lie: in arenas in forward order, cut into chunks, bundled for their update."""

from __future__ import annotations

from .packing import Packer
from .plan import Plan
from .slots import Bundle, Job, Slice, Slot

__all__ = ["Bundle", "Job", "Packer", "Plan", "Slice", "Slot"]
