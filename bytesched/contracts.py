"""The name that `bytesched.testing.transport` had before; it stays."""

from __future__ import annotations

from bytesched.testing.transport import Contract, TransportContract

__all__ = ["Contract", "TransportContract"]
