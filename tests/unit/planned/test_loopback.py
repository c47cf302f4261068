"""A whole session in one process: its bits are those of training without it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loopback import Loopback
from torch import Tensor, nn
from torch.optim import Optimizer

from bytesched.errors import PeerLost, SchedulerTimeout, TransportError
from bytesched.plugins.planned.hooked_session import HookedSession

STEPS = 6
#: far below the size of one layer, so that every layer is cut
SMALL: dict[str, Any] = {"partition_bytes": 256, "credit_bytes": 512}

MakeOptimizer = Callable[[nn.Module], Optimizer]


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def inputs(step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 8, generator=generator)


def train(model: nn.Module, optimizer: Optimizer, steps: int = STEPS, rank: int = 0) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(step, rank)).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    loopback = Loopback(timeout_s=100.0)
    yield loopback
    loopback.close()


@pytest.mark.parametrize("optimizer_of", [sgd, adamw])
@pytest.mark.parametrize("cross_barrier", [True, False])
def test_one_rank_has_the_bits_of_plain_training(
    loopback: Loopback, optimizer_of: MakeOptimizer, cross_barrier: bool
) -> None:
    plain = mlp()
    train(plain, optimizer_of(plain))
    model = mlp()
    optimizer = optimizer_of(model)
    session = loopback.wrap(model, optimizer, cross_barrier=cross_barrier, **SMALL)
    train(model, optimizer)
    session.flush()
    stats = session.stats()
    session.close()
    assert all(map(torch.equal, weights(plain), weights(model)))
    assert stats["mode"] == ("cross" if cross_barrier else "backward")
    assert float(stats["chunks"]) > 4


def test_several_ranks_have_the_bits_of_their_mean() -> None:
    """With two ranks the mean is exact in any order."""
    loopback = Loopback(2, timeout_s=100.0)

    def on_rank(rank: int) -> list[Tensor]:
        model = models[rank]
        optimizer = sgd(model)
        session = loopback.wrap(model, optimizer, rank=rank, **SMALL)
        train(model, optimizer, rank=rank)
        session.flush()
        session.close()
        return weights(model)

    models = [mlp(), mlp()]
    first, second = loopback.run(on_rank)
    loopback.close()
    plain = mlp()
    optimizer = sgd(plain)
    for step in range(STEPS):
        gradients = []
        for rank in range(2):
            optimizer.zero_grad()
            plain(inputs(step, rank)).square().mean().backward()
            gradients.append([p.grad for p in plain.parameters() if p.grad is not None])
        for parameter, mine, other in zip(plain.parameters(), *gradients, strict=True):
            parameter.grad = mine / 2 + other / 2
        optimizer.step()
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, weights(plain)))


def wrapped(loopback: Loopback) -> tuple[nn.Module, Optimizer, HookedSession]:
    """A session after its warm-up."""
    model = mlp()
    optimizer = sgd(model)
    session = loopback.wrap(model, optimizer, **SMALL)
    train(model, optimizer, steps=2)
    return model, optimizer, session


def test_step_does_not_wait_for_the_wire(loopback: Loopback) -> None:
    model, optimizer, session = wrapped(loopback)
    before = session.stats()["barrier_crossed_steps"]
    session.wait_reduced()
    loopback.hold()
    optimizer.zero_grad()
    model(inputs(2)).square().mean().backward()
    optimizer.step()
    assert float(session.stats()["barrier_crossed_steps"]) == float(before) + 1
    loopback.release()
    session.flush()
    session.close()
    plain = mlp()
    train(plain, sgd(plain), steps=3)
    assert all(map(torch.equal, weights(plain), weights(model)))


def test_an_error_of_the_carrier_is_raised_where_the_user_waits(loopback: Loopback) -> None:
    model, optimizer, session = wrapped(loopback)
    error = TransportError("the cable was cut", task="chunk", rank=0)
    loopback.fail(error)
    with pytest.raises(TransportError, match="the cable was cut"):
        train(model, optimizer)
    assert session.error is error
    session.close(release_parameters=False)


def test_a_chunk_that_does_not_come_back_is_a_timeout() -> None:
    loopback = Loopback(timeout_s=0.5)
    model, optimizer, session = wrapped(loopback)
    loopback.hold()
    with pytest.raises(SchedulerTimeout, match=r"not all ranks came within 0\.5 s") as raised:
        train(model, optimizer)
    assert re.fullmatch(r"[03]\..*", raised.value.task or "")
    session.close(release_parameters=False)
    loopback.close()


def test_a_rank_that_gives_up_ends_the_others() -> None:
    loopback = Loopback(2, timeout_s=100.0)
    models = [mlp(), mlp()]

    def on_rank(rank: int) -> str:
        optimizer = sgd(models[rank])
        session = loopback.wrap(models[rank], optimizer, rank=rank, **SMALL)
        train(models[rank], optimizer, steps=2)
        session.flush()
        if rank:
            session.fail(ValueError("no more"))
        with pytest.raises((PeerLost, ValueError)) as raised:
            train(models[rank], optimizer)
        session.close(release_parameters=False)
        return str(raised.value)

    first, second = loopback.run(on_rank)
    loopback.close()
    assert "rank 1 gave up: ValueError: no more" in first
    assert second == "no more"
