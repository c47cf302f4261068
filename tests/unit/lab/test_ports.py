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


def test_a_port_that_something_listens_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, free_port())) as taken:
        drawn = iter([taken.getsockname()[1], free := free_port()])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
        assert free_port() == free


@pytest.mark.parametrize("said", [None, "", "1024 65535"])
def test_where_connections_may_have_any_port_it_is_free_at_the_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None
) -> None:
    given = tmp_path / "range"
    if said is not None:
        given.write_text(said)
    monkeypatch.setattr(ports, "_GIVEN", given)
    with socket.create_server((LOOPBACK, port := free_port())) as service:
        assert service.getsockname() == (LOOPBACK, port)


def test_an_address_of_another_machine_has_none() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")
