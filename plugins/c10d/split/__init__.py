"""The split all-reduce: sums to their owners, what a script asks of all gradients, sums to all."""

from __future__ import annotations

from bytesched.plugins.c10d.split.splitter import ExchangeSplitter

__all__ = ["ExchangeSplitter"]
