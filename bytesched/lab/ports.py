"""Ports of this machine for a service that another process is to open."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

#: those that the kernel gives to connections (Linux, ip-sysctl)
_GIVEN: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: below it are ports of known services
_FIRST: Final = 20000
_TRIES: Final = 100


def free_port(address: str = "127.0.0.1") -> int:
    """A port of ``address`` that nothing listens on.

    Where it can be, none that the kernel gives to connections: one of those may be taken by any
    process before the service is there.
    """
    # Not in a row that others draw as well, who have seeded theirs alike.
    draw = random.SystemRandom()
    with suppress(OSError, ValueError, IndexError):
        stop = int(_GIVEN.read_text().split()[0])
        for _ in range(_TRIES):
            with suppress(OSError):
                return _bound(address, draw.randrange(_FIRST, stop))
    return _bound(address, 0)


def _bound(address: str, port: int) -> int:
    """``port``, any if it is 0. Raises OSError if something listens on it."""
    with socket.socket() as probe:
        probe.bind((address, port))
        found: int = probe.getsockname()[1]
        return found
