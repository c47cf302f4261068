"""A broken link between two calls: whoever touches it next gets a named error, whichever rank."""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from connected import connected, two_connected
from fake_gloo import CLOSED, FakeGloo, fake_group
from together import together
from torch._C._distributed_c10d import HashStore

from bytesched.errors import PeerLost, TransportError
from bytesched.plugins.routes import group as module
from bytesched.plugins.routes.group import Group
from bytesched.plugins.routes.messages import Messages
from bytesched.plugins.routes.store import Notes


@pytest.fixture
def group() -> Group:
    """Its peer is gone, and has said why."""
    store, gloo = HashStore(), FakeGloo()
    Notes(store, rank=1).leave("ValueError: boom")
    gloo.gone.add(1)
    return fake_group(gloo, store=store)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("[tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:7", "PeerLost"),
        ("[tcp/pair.cc:537] Read error [10.0.0.2]:7: Connection reset by peer", "PeerLost"),
        ("[tcp/unbound_buffer.cc:78] Timed out waiting 1ms for recv", "SchedulerTimeout"),
        ("Application timeout caused pair closure", "SchedulerTimeout"),
        ("[tcp/pair.cc:1] writev: No space left on device", "TransportError"),
        ("NCCL communicator was aborted on rank 0.", "TransportError"),
    ],
)
def test_every_failure_of_a_link_has_a_name(group: Group, said: str, kind: str) -> None:
    error = group.error(RuntimeError(said), task="chunk")
    assert type(error).__name__ == kind
    assert isinstance(error, TransportError)
    assert said in str(error)
    assert "task chunk, seen by rank 0" in str(error)
    assert "; rank 1 said: ValueError: boom" in str(error)


def test_every_rank_has_the_texts_of_all() -> None:
    groups = two_connected()
    texts = ["", "größer\0"]
    assert together(lambda rank: groups[rank].gather_text("what", texts[rank])) == [texts, texts]
    for group in groups:
        group.close()


class Forgotten:
    """A collective that Gloo does not tell of anything any more."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta | None = None) -> None:
        # Without one: as long as the operation may take.
        time.sleep(timeout.total_seconds() if timeout else 300.0)
        raise RuntimeError("Operation timed out!")


def test_a_forgotten_collective_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOKS_EVERY", timedelta(milliseconds=20))
    group, other = two_connected()
    ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def wait() -> None:
        try:
            group.wait(Forgotten(), task="chunk")
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            ended.put(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    # A slow one is left alone, and so are others beside it.
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.1)
    works = [g.backend.allreduce([torch.ones(3)]) for g in (group, other)]
    for g, work in zip((group, other), works, strict=True):
        g.wait(work)
    other.abort()
    error = ended.get(timeout=250.0)
    assert isinstance(error, PeerLost)
    assert error.peers == (1,)
    assert "rank 1 is gone" in str(error)
    assert "task chunk" in str(error)
    for g in (group, other):
        g.close()


class GoesBeforeTheWait:
    """A backend; one peer breaks its connections when something is to be received from it."""

    def __init__(self, backend: Any, going: Group) -> None:
        self._backend = backend
        self._going = going

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        work = self._backend.recv(tensors, peer, tag)
        if peer == self._going.rank:
            self._going.abort()
        return work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_a_rank_that_aborts_while_another_goes_reaches_those_that_are_left() -> None:
    """As where several ranks stop at once; a receive that ends with its peer breaks nothing."""
    group, going, left = connected(3)
    awaited = left.receive(torch.empty(1), group.rank, tag=0)
    group.backend = GoesBeforeTheWait(group.backend, going)
    group.abort()
    with pytest.raises(PeerLost):
        Messages(left).wait(awaited, group.rank, task="")
    for g in (group, going, left):
        g.close()


def test_a_rank_is_named_whose_connections_break_one_after_the_other() -> None:
    gloo = FakeGloo()
    group = fake_group(gloo)
    threading.Timer(0.02, gloo.gone.add, [1]).start()
    # Of another group.
    error = group.error(RuntimeError(CLOSED))
    assert isinstance(error, PeerLost)
    assert error.peers == (1,)
