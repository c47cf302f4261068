"""What a server keeps, sums and answers."""

from __future__ import annotations

from bytesched.plugins.mpi_kvstore.server.server import Server

__all__ = ["Server"]
