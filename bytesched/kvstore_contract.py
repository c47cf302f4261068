"""The name that `bytesched.testing.kvstore` had before; it stays."""

from __future__ import annotations

from bytesched.testing.kvstore import KVStoreContract

__all__ = ["KVStoreContract"]
