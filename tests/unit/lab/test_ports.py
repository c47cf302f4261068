"""Ports for services that are opened later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from bytesched.lab import ports
from bytesched.lab.ports import free_port

LOOPBACK = "127.0.0.1"


def test_no_connection_is_given_a_port_before_its_service_is_there() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        port = free_port()
        assert 1024 <= port < first
        with socket.create_server((LOOPBACK, port)):
            pass


@pytest.mark.parametrize("tries", [2, 1])
def test_a_port_that_something_listens_on_is_not_free(
    tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all that are tried are taken, the kernel names another one."""
    monkeypatch.setattr(ports, "_TRIES", tries)
    with socket.create_server((LOOPBACK, free_port())) as taken:
        drawn = [taken.getsockname()[1], free := free_port()]
        monkeypatch.setattr(random.SystemRandom, "choice", lambda *_: drawn.pop(0))
        found = free_port()
    assert found == free if tries > 1 else found not in drawn


def test_an_address_of_another_machine_has_none() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")
