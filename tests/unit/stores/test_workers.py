"""Sums before training: they end within a time, where the store can be asked without a wait."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytesched.errors import PeerLost, SchedulerTimeout
from bytesched.plugins.stores.training.workers import Workers


def workers_of(push: Callable[..., None]) -> Workers:
    store = SimpleNamespace(
        rank=1, num_workers=2, init=lambda key, like: None, start_push=push, start_pull=None
    )
    return Workers(store, name="mine", timeout_s=0.01)


def test_a_store_that_does_not_answer_is_an_error_of_the_session() -> None:
    with pytest.raises(SchedulerTimeout, match=r"not answered within 0\.02 s") as raised:
        workers_of(lambda key, tensor, ended: None).sum(torch.zeros(1), "rate")
    assert (raised.value.task, raised.value.rank) == ("rate", 1)


def test_an_error_of_the_store_is_raised() -> None:
    def push(key: str, tensor: Any, ended: Callable[[BaseException], None]) -> None:
        ended(PeerLost("server 0 is gone"))

    with pytest.raises(PeerLost, match="server 0"):
        workers_of(push).sum(torch.zeros(1), "rate")
