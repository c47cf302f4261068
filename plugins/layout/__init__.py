"""Where gradients lie: in arenas in forward order, cut into chunks, bundled for their update."""

from __future__ import annotations

from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Bundle, Job, Slice, Slot

__all__ = ["Bundle", "Job", "Packer", "Plan", "Slice", "Slot"]
