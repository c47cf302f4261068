"""The user's own optimizer, run later, on a part of the model."""

from __future__ import annotations

from bytesched.plugins.optimizer.deferred import Deferred
from bytesched.plugins.optimizer.explained import explain_optimizer
from bytesched.plugins.optimizer.separable import (
    is_elementwise,
    separable,
    why_not_deferred,
    why_not_sharded,
)
from bytesched.plugins.optimizer.stepping import stepping_optimizer

__all__ = [
    "Deferred",
    "explain_optimizer",
    "is_elementwise",
    "separable",
    "stepping_optimizer",
    "why_not_deferred",
    "why_not_sharded",
]
