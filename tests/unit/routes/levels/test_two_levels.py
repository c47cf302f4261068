"""Chunks through sums in two levels: packed, summed, taken over, and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gloo import Ends, task_of

from bytesched.errors import BytesschedError, PeerLost, SchedulerClosed, TransportError
from bytesched.plugins.routes.levels.two_levels import TwoLevelTransport
from bytesched.task import CommTask


class Rank:
    """What a transport has around it; says what happened."""

    def __init__(self, *, raised: Exception | None = None) -> None:
        self.log: list[str] = []
        self.packed = torch.ones(3)
        self.ended: Callable[[BytesschedError | None], None]
        self._raised = raised
        made: Any = self
        self.transport = TwoLevelTransport(made, made)
        self.ends = Ends()

    def pack(self, task: CommTask) -> torch.Tensor:
        self.log.append("pack")
        return self.packed

    def begin(self, tensor: torch.Tensor, task: str, ended: Any) -> None:
        assert tensor is self.packed
        self.log.append(f"begin {task}")
        self.ended = ended

    def receive(self, task: CommTask) -> None:
        self.log.append("receive")
        if self._raised is not None:
            raise self._raised

    def let_go(self, task: CommTask) -> None:
        self.log.append("let go")

    def close(self) -> None:
        self.log.append("close")


def test_a_sum_is_taken_over_before_it_is_reported() -> None:
    rank = Rank()
    rank.transport.start(task_of(), rank.ends.done)
    assert rank.log == ["pack", "begin t0"]
    assert not rank.ends.names
    rank.ended(None)
    assert rank.log[2:] == ["receive", "let go"]
    assert rank.ends.names == ["t0"]
    assert not rank.ends.errors


@pytest.mark.parametrize("error", [PeerLost("gone"), SchedulerClosed("closed")])
def test_nothing_is_taken_over_of_a_sum_that_failed(error: BytesschedError) -> None:
    rank = Rank()
    rank.transport.start(task_of(), rank.ends.done)
    rank.ended(error)
    assert rank.ends.errors == {"t0": error}
    assert rank.log == ["pack", "begin t0"]


def test_a_sum_that_cannot_be_taken_over_is_an_error_of_ours() -> None:
    rank = Rank(raised=RuntimeError("other dtypes"))
    rank.transport.start(task_of(), rank.ends.done)
    rank.ended(None)
    assert isinstance(rank.ends.errors["t0"], TransportError)
    assert "other dtypes" in str(rank.ends.errors["t0"])


def test_closed_it_closes_the_sums() -> None:
    rank = Rank()
    rank.transport.close()
    assert rank.log == ["close"]
