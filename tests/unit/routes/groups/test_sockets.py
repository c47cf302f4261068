"""Sockets whose queues are shortened are those that were opened inside, and no others."""

from __future__ import annotations

import socket

import pytest

from bytesched.plugins.routes.groups import sockets
from bytesched.plugins.routes.groups.sockets import short_queues

UNSENT_BYTES = 4096


def unsent_bytes(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, sockets._TCP_NOTSENT_LOWAT)


def test_only_sockets_that_are_opened_inside() -> None:
    with socket.socket() as before:
        with short_queues(UNSENT_BYTES):
            inside = socket.socket()
        with inside:
            assert unsent_bytes(inside) == UNSENT_BYTES
            assert unsent_bytes(before) != UNSENT_BYTES


def test_a_number_that_stands_for_another_socket_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        listed = iter([{}, {"socket:[1]": other.fileno()}])
        monkeypatch.setattr(sockets, "_sockets", lambda: next(listed))
        with short_queues(UNSENT_BYTES):
            pass
        assert unsent_bytes(other) != UNSENT_BYTES
