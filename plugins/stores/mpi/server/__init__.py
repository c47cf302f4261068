"""What a server keeps, sums and answers."""

from __future__ import annotations

from .server import Server

__all__ = ["Server"]
