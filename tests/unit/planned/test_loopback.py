"""A whole session in one process: its bits are those of training without it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loopback import Loopback
from looped import SMALL, TIMEOUT_S, MakeOptimizer, Training, check_equal, inputs, mlp, sgd, weights
from torch import Tensor, nn
from torch.optim import Optimizer

from bytesched.errors import PeerLost, SchedulerTimeout, TransportError


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.fixture
def two() -> Iterator[Loopback]:
    """With two ranks the mean is exact in any order."""
    loopback = Loopback(2, timeout_s=TIMEOUT_S)
    yield loopback
    loopback.close()


def train(model: nn.Module, optimizer: Optimizer, steps: int, rank: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(step, rank)).square().mean().backward()
        optimizer.step()


def means(mine: list[Any], others: list[Any]) -> list[Tensor]:
    """Of two ranks, of which the second may have none."""
    return [
        one / 2 if other is None else one / 2 + other / 2
        for one, other in zip(mine, others, strict=True)
    ]


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


def test_several_ranks_have_the_bits_of_their_mean(two: Loopback) -> None:
    steps, models = 6, [mlp(), mlp()]

    def on_rank(rank: int) -> list[Tensor]:
        optimizer = sgd(models[rank])
        session = two.wrap(models[rank], optimizer, rank=rank, **SMALL)
        train(models[rank], optimizer, steps, rank)
        session.flush()
        session.close()
        return weights(models[rank])

    first, second = two.run(on_rank)
    plain = mlp()
    optimizer = sgd(plain)
    for step in range(steps):
        gradients = []
        for rank in range(2):
            optimizer.zero_grad()
            plain(inputs(step, rank)).square().mean().backward()
            gradients.append([p.grad for p in plain.parameters()])
        for parameter, mean in zip(plain.parameters(), means(*gradients), strict=True):
            parameter.grad = mean
        optimizer.step()
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, weights(plain)))


def test_what_some_ranks_have_no_gradient_of_is_the_mean_and_what_none_has_stays_as_it_was(
    two: Loopback,
) -> None:
    """Rank 0 uses the first two of three layers, rank 1 the first; nothing is zeroed."""
    models = [mlp(), mlp()]

    def on_rank(rank: int) -> list[Tensor]:
        model: Any = models[rank]
        session = two.wrap(model, sgd(model), rank=rank, find_unused=True, **SMALL)
        model(inputs(rank)).sum().backward()
        for parameter in model[3].parameters():
            # Of this rank alone: their mean would be another.
            parameter.grad.mul_(rank + 2.0)
        before = [p.grad.clone() for p in model.parameters()]
        for parameter in list(model.parameters())[:4]:
            parameter.grad = None
        used = model[:2] if rank else model[:3]
        model(inputs(rank))
        used(inputs(rank)).sum().backward()
        after = [p.grad.clone() for p in model.parameters()]
        assert all(map(torch.equal, before[4:], after[4:]))
        session.flush()
        session.close()
        return after[:4]

    first, second = two.run(on_rank)
    gradients = []
    for rank in range(2):
        model: Any = mlp()
        (model[:2] if rank else model[:3])(inputs(rank)).sum().backward()
        gradients.append([p.grad for p in list(model.parameters())[:4]])
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, means(*gradients)))


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


def test_a_rank_that_gives_up_ends_the_others(two: Loopback) -> None:
    models = [mlp(), mlp()]

    def on_rank(rank: int) -> str:
        optimizer = sgd(models[rank])
        session = two.wrap(models[rank], optimizer, rank=rank, **SMALL)
        train(models[rank], optimizer, 2, rank)
        session.flush()
        if rank:
            session.fail(ValueError("no more"))
        with pytest.raises((PeerLost, ValueError)) as raised:
            train(models[rank], optimizer, 6, rank)
        session.close(release_parameters=False)
        return str(raised.value)

    first, second = two.run(on_rank)
    assert "rank 1 gave up: ValueError: no more" in first
    assert second == "no more"
