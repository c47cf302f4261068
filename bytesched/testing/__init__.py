"""A suite that a store of yours must pass, and `Loopback`, a backend for tests of one process.

Free of pytest: the suite is a class with ``test_`` methods. `Loopback` needs torch, and is imported
when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytesched.testing.kvstore_suite import KVStoreContract

if TYPE_CHECKING:
    from bytesched.plugins.loopback import Loopback

__all__ = ["KVStoreContract", "Loopback"]


def __getattr__(name: str) -> Any:
    if name == "Loopback":
        return import_module("bytesched.plugins.loopback").Loopback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
