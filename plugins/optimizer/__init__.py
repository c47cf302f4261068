"""The user's own optimizer, run later, on a part of the model."""

from __future__ import annotations

from bytesched.plugins.optimizer.deferred import Deferred
from bytesched.plugins.optimizer.separable import is_elementwise, why_not_deferred

__all__ = ["Deferred", "is_elementwise", "why_not_deferred"]
