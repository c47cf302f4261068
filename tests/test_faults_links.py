"""A broken link between two calls: whoever touches it next gets a named error, whichever rank."""

from __future__ import annotations

import queue
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from bytesched.errors import PeerLost, TransportError
from bytesched.plugins.c10d import Group
from bytesched.plugins.control import Follower, Leader
from bytesched.plugins.notes import Notes
from bytesched.task import CommTask


class BrokenLink:
    """A backend whose peer is gone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def name(self) -> str:
        return "gloo"

    def send(self, *_: object) -> Any:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    recv = send


@pytest.fixture
def group() -> Group:
    store = HashStore()
    Notes(store, rank=1).leave("ValueError: boom")
    return Group(BrokenLink(), store, Notes(store, rank=0), name="s/control", timeout_s=5.0)


def test_the_leader_names_a_message_that_cannot_be_sent(group: Group) -> None:
    leader = Leader(group, 1, replay=False, blocked_ns=lambda: 0)
    task = CommTask("chunk", start_at=0, stop_at=4)
    task.index = 0
    with pytest.raises(PeerLost, match=r"rank 1 said: ValueError: boom \(task the leader's order"):
        leader.announce([task])


def test_a_follower_names_a_message_that_cannot_be_received(group: Group) -> None:
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    follower = Follower(group, 1, ordered=lambda _: None, on_error=errors.put)
    follower.chunk_ready()
    assert isinstance(errors.get(timeout=5.0), PeerLost)
    follower.close()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("[tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:7", "PeerLost"),
        ("[tcp/pair.cc:537] Read error [10.0.0.2]:7: Connection reset by peer", "PeerLost"),
        ("[tcp/unbound_buffer.cc:78] Timed out waiting 1ms for recv", "SchedulerTimeout"),
        ("Application timeout caused pair closure", "SchedulerTimeout"),
        ("[tcp/pair.cc:1] writev: No space left on device", "TransportError"),
    ],
)
def test_every_failure_of_a_link_has_a_name(group: Group, said: str, kind: str) -> None:
    error = group.error(RuntimeError(said), task="chunk")
    assert type(error).__name__ == kind
    assert isinstance(error, TransportError)
    assert said in str(error)
    assert "task chunk, seen by rank 0" in str(error)


def test_the_first_note_counts() -> None:
    """What follows from it would only hide the reason."""
    store = HashStore()
    Notes(store, rank=1).leave("the reason")
    Notes(store, rank=2).leave("a consequence")
    assert Notes(store, rank=0).read() == "; rank 1 said: the reason"
    assert Notes(store, rank=1).read() == ""
