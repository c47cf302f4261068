"""Dependency proxies: parameters, gradients and modules that wait. They know no plan."""

from __future__ import annotations

from .compiling import exclude_compiler, has_compiled
from .first_use import FirstUse
from .hooks import StayingForwardHook, StayingHook, gate
from .pending import PendingParameter, hold, is_held, release

__all__ = [
    "FirstUse",
    "PendingParameter",
    "StayingForwardHook",
    "StayingHook",
    "exclude_compiler",
    "gate",
    "has_compiled",
    "hold",
    "is_held",
    "release",
]
