"""Ports of this machine for a service that another process is to open."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from typing import Final

#: above those of known services, and below those that Linux gives to connections
_PORTS: Final = range(20000, 32768)
_TRIES: Final = 100


def free_port(address: str = "127.0.0.1") -> int:
    """A port of ``address`` that nothing listens on. Raises OSError if there is none.

    If it can be, none that the kernel gives to connections: one of those may be taken by any
    process before the service is there.
    """
    # Not in a row that others draw as well, who have seeded theirs alike.
    draw = random.SystemRandom()
    with socket.socket() as probe:
        for _ in range(_TRIES):
            with suppress(OSError):
                probe.bind((address, port := draw.choice(_PORTS)))
                return port
        probe.bind((address, 0))
        found: int = probe.getsockname()[1]
        return found
