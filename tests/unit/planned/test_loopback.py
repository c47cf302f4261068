"""A whole session in one process: its bits are those of training without it."""

from __future__ import annotations

import re

import pytest
import torch
from loopback import Loopback
from looped import MakeOptimizer, Training, check_equal, sgd
from torch import nn
from torch.optim import Optimizer

from bytesched.errors import SchedulerTimeout, TransportError


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("optimizer_of", [sgd, adamw])
@pytest.mark.parametrize("cross_barrier", [True, False])
def test_one_rank_has_the_bits_of_plain_training(
    loopback: Loopback, optimizer_of: MakeOptimizer, cross_barrier: bool
) -> None:
    ours = Training(loopback, optimizer_of, cross_barrier=cross_barrier)
    plain = Training(None, optimizer_of)
    for training in (ours, plain):
        training.train(6)
    check_equal(ours, plain)
    stats = ours.session.stats()
    ours.session.close()
    assert stats["mode"] == ("cross" if cross_barrier else "backward")
    assert float(stats["chunks"]) > 4


def test_an_error_of_the_carrier_is_raised_where_the_user_waits(
    loopback: Loopback, ours: Training
) -> None:
    error = TransportError("the cable was cut", task="chunk", rank=0)
    loopback.fail(error)
    with pytest.raises(TransportError, match="the cable was cut"):
        ours.train(6)
    assert ours.session.error is error


def test_a_chunk_that_does_not_come_back_is_a_timeout() -> None:
    loopback = Loopback(timeout_s=0.5)
    ours = Training(loopback)
    ours.train(2)
    loopback.hold()
    with pytest.raises(SchedulerTimeout, match=r"not all ranks came within 0\.5 s") as raised:
        ours.train(6)
    assert re.fullmatch(r"[03]\..*", raised.value.task or "")
    ours.session.close(release_parameters=False)
    loopback.close()
