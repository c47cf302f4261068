"""Groups of one session: opened in turn, closed together on an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from connected import two_connected

from bytesched.config import Config
from bytesched.errors import PeerLost, TransportError
from bytesched.plugins.c10d.joining import Joining
from bytesched.plugins.c10d.shell import BufferBroadcast
from bytesched.plugins.failures import Failures


class FakeGroup:
    """Of two ranks; what is called of it is written down."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.rank = 0
        self.hosts: list[str] = []
        self._calls = calls

    def gather_text(self, key: str, text: str) -> list[str]:
        self._calls.append(f"{self.name} gathers {key}")
        return [text, text]

    def leave_note(self, text: str) -> None:
        self._calls.append(f"{self.name} notes {text}")

    def abort(self) -> None:
        self._calls.append(f"{self.name} breaks")

    def close(self) -> None:
        self._calls.append(f"{self.name} closes")


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def ranks(calls: list[str]) -> Joining:
    def opened(kind: str, purpose: str, members: object) -> Any:
        if purpose == "never":
            raise OSError("no connection")
        calls.append(f"open {purpose} on {kind}")
        return FakeGroup(purpose, calls)

    return Joining(opened, Config())


def test_a_group_that_cannot_be_opened_closes_the_others(ranks: Joining, calls: list[str]) -> None:
    def join() -> None:
        with ranks:
            ranks.open("data")
            ranks.open("never", "nccl")

    with pytest.raises(OSError, match="no connection"):
        join()
    assert calls == [
        "open data on gloo",
        "data gathers host",
        "data notes OSError: no connection",
        "data breaks",
        "data closes",
    ]


def test_an_error_closes_all_groups(ranks: Joining, calls: list[str]) -> None:
    def join() -> None:
        with ranks:
            ranks.open("data")
            ranks.open("control")
            raise PeerLost("rank 1 is gone", rank=0)

    with pytest.raises(PeerLost):
        join()
    # The note of a rank that only lost another one would hide the reason.
    assert calls[3:] == ["control breaks", "control closes", "data breaks", "data closes"]


def test_a_broadcast_that_this_rank_has_broken_itself_raises_why() -> None:
    """A thread of ours has heard that another rank is gone: no deadline has passed."""
    here, other = two_connected()
    failures = Failures(here)
    lost = PeerLost("rank 1 is gone", peers=[1])
    failures.fail(lost)
    ddp: Any = None
    with pytest.raises(TransportError) as raised:
        BufferBroadcast(here, failures.raise_first)(ddp, {"buffer": torch.ones(2)})
    assert raised.value is lost
    assert failures.is_error_seen
    other.abort()
    for group in (here, other):
        group.close()
