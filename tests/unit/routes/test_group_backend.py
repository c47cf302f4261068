"""torch.distributed as a backend: what sums where, and what of it ends with the session."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from connected import two_connected
from fake_gloo import FakeGloo, FakeWork, fake_group, task_of

from bytesched.errors import SchedulerTimeout, TransportError
from bytesched.plugins.routes.group_backend import C10dBackend


class Levels:
    """Sums in two levels, which the test ends."""

    groups = ()

    def __init__(self) -> None:
        self.begun: list[tuple[torch.Tensor, FakeWork]] = []
        self.is_closed = False

    def start(self, tensor: torch.Tensor) -> FakeWork:
        self.begun.append((tensor, FakeWork()))
        return self.begun[-1][1]

    def close(self) -> None:
        self.is_closed = True


def test_only_what_is_summed_in_one_order_goes_in_two_levels() -> None:
    """Gradients; whole numbers add up in any order, and votes shall not wait for a host."""
    gloo, levels = FakeGloo(), Levels()
    made: Any = levels
    backend = C10dBackend(fake_group(gloo), fake_group(FakeGloo()), levels=made)
    assert backend.levels == 2
    gradients, votes = torch.ones(3), torch.ones(3, dtype=torch.int64)
    work = backend.reduce(task_of(4), gradients)
    backend.sum(votes, "votes")
    assert [tensor is gradients for tensor, _ in levels.begun] == [True]
    assert [tensor for _, tensor, *_ in gloo.begun] == [votes]
    levels.begun[0][1].end("broken")
    with pytest.raises(TransportError, match="broken"):
        backend.wait(work, task="t4")
    gloo.works()[0].end()
    backend.close()
    assert levels.is_closed


def test_without_levels_all_is_summed_at_once() -> None:
    gloo = FakeGloo()
    backend = C10dBackend(fake_group(gloo), fake_group(FakeGloo()))
    assert backend.levels == 1
    backend.reduce(task_of(), torch.ones(3))
    backend.sum(torch.ones(1, dtype=torch.int64), "votes")
    assert [kind for kind, *_ in gloo.begun] == ["allreduce"] * 2
    for work in gloo.works():
        work.end()
    backend.close()


def test_every_group_is_broken_where_one_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    data, control, buffers = groups = [fake_group(FakeGloo()) for _ in range(3)]
    backend = C10dBackend(data, control, buffers)

    def refuse() -> None:
        raise OSError("no descriptors are left")

    control.abort = refuse  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "bytesched"):
        backend.abort()
    assert "could not be broken" in caplog.text
    assert [group.is_aborted for group in groups] == [True, False, True]


def test_a_timeout_shows_why_another_rank_stopped() -> None:
    data = fake_group(FakeGloo())
    data.note = lambda: "; rank 1 said: the reason"  # type: ignore[method-assign]
    error = C10dBackend(data, fake_group(FakeGloo())).timeout("waited 5 s", lambda: "a\nb")
    assert isinstance(error, SchedulerTimeout)
    assert "waited 5 s; rank 1 said: the reason" in str(error)
    assert (error.rank, error.story) == (0, ("a", "b"))


def test_the_last_sum_is_over_before_connections_end() -> None:
    """All ranks take part in it; where one does not, connections are broken first."""
    for is_joined in (True, False):
        gloo = FakeGloo()
        data = fake_group(gloo, timeout_s=0.01)
        backend = C10dBackend(data, fake_group(FakeGloo()))
        backend.sum(torch.ones(1), "votes")
        (work,) = gloo.works()
        if is_joined:
            work.end()
        backend.close()
        assert work.waited_for.is_set()
        assert bool(gloo.gone) is not is_joined


def test_a_sum_that_nobody_joins_does_not_hold_up_the_end() -> None:
    group, other = two_connected(timeout_s=0.1)
    control, others_control = two_connected()
    backend = C10dBackend(group, control)
    backend.sum(torch.ones(1), "votes")
    backend.close()
    # Gloo's own threads: with one of them in the sum, the connection would not be let go of.
    assert "bytesched-ending" not in {thread.name for thread in threading.enumerate()}
    for g in (other, others_control):
        g.close()
