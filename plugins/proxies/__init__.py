"""Dependency proxies: parameters, gradients and modules that wait. They know no plan."""

from __future__ import annotations

from bytesched.plugins.proxies.compiling import exclude_compiler, has_compiled
from bytesched.plugins.proxies.first_use import FirstUse
from bytesched.plugins.proxies.hooks import StayingForwardHook, StayingHook, gate
from bytesched.plugins.proxies.pending import LazyGrad, PendingParameter, hold, is_held, release

__all__ = [
    "FirstUse",
    "LazyGrad",
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
