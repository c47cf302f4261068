"""Parameter servers: the protocol of a store, and one within the process."""

from __future__ import annotations

from bytesched.kvstore.local import LocalKVStore
from bytesched.kvstore.protocol import AsyncKVStore, Ended, Key, KVStore, describe

__all__ = ["AsyncKVStore", "Ended", "KVStore", "Key", "LocalKVStore", "describe"]
