"""Stepping: `step()` arms what is on the wire, and does at once what cannot wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from looped import SMALL, Training, check_equal, inputs, mlp, sgd
from torch import Tensor, nn
from torch.optim import Optimizer

from bytesched.errors import PluginError
from bytesched.plugins.proxies.pending import is_held
from bytesched.testing import Loopback


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def grouped(model: nn.Module) -> Optimizer:
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.5}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("optimizer_of", [sgd, adamw, grouped])
def test_it_returns_while_all_is_on_the_wire(loopback: Loopback, optimizer_of: Any) -> None:
    ours, plain = Training(loopback, optimizer_of), Training(None, optimizer_of)
    ours.train(2)
    ours.flush()
    before = ours.crossed_steps()
    loopback.hold()
    ours.train()
    assert all(is_held(parameter) for parameter in ours.model.parameters())
    assert ours.crossed_steps() == before + 1
    loopback.release()
    plain.train(3)
    check_equal(ours, plain)
    assert ours.session is not None
    ours.session.close()
    check_equal(ours, plain)


def test_what_is_reduced_is_updated_at_once(ours: Training, plain: Training) -> None:
    before = ours.crossed_steps()
    ours.backward()
    assert ours.session is not None
    ours.session.wait_reduced()
    ours.optimizer.step()
    assert not any(is_held(parameter) for parameter in ours.model.parameters())
    assert ours.crossed_steps() == before
    plain.train()
    check_equal(ours, plain)


def test_hyperparameters_are_those_of_the_step(
    loopback: Loopback, ours: Training, plain: Training
) -> None:
    loopback.hold()
    ours.train()
    ours.optimizer.param_groups[0]["lr"] = 1000.0
    loopback.release()
    plain.train()
    check_equal(ours, plain)


def test_a_closure_is_stepped_whole(ours: Training, plain: Training) -> None:
    for training in (ours, plain):

        def closure(training: Training = training) -> Tensor:
            training.optimizer.zero_grad()
            loss: Tensor = training.model(inputs(5)).square().mean()
            loss.backward()
            return loss

        training.optimizer.step(closure)  # type: ignore[arg-type]
        training.train()
    check_equal(ours, plain)


def test_a_gradient_of_the_users_is_stepped_at_once(
    loopback: Loopback, ours: Training, plain: Training
) -> None:
    loopback.hold()
    for training in (ours, plain):
        training.backward()
        first, *_ = training.model.parameters()
        first.grad = torch.ones_like(first.detach())
    # It waits for the chunks of that parameter, or they would come after its update.
    loopback.release()
    for training in (ours, plain):
        training.optimizer.step()
    check_equal(ours, plain)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_hooks_of_the_users_see_what_they_would_see(
    ours: Training, plain: Training, moment: str
) -> None:
    seen: list[list[Tensor]] = []

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = optimizer.param_groups[0]["params"]
        seen.append([parameter.grad.clone() for parameter in parameters])
        if moment == "before":
            for parameter in parameters:
                parameter.grad.mul_(0.5)

    for training in (ours, plain):
        if moment == "before":
            training.optimizer.register_step_pre_hook(look)
        else:
            training.optimizer.register_step_post_hook(look)
        training.train()
    assert all(map(torch.equal, *seen))
    check_equal(ours, plain)


def test_a_step_without_a_backward_pass_changes_what_it_would(
    ours: Training, plain: Training
) -> None:
    for training in (ours, plain):
        training.train()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.optimizer.step()
    check_equal(ours, plain)


def test_a_state_that_is_loaded_is_trained_on_with(
    loopback: Loopback, ours: Training, plain: Training
) -> None:
    plain.train()
    loopback.hold()
    ours.train()
    loopback.release()
    # Loading alone would share the tensors.
    ours.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    ours.train()
    plain.train()
    check_equal(ours, plain)


def test_parameters_are_in_one_optimizer(loopback: Loopback) -> None:
    model: Any = mlp()
    optimizer = sgd(model)
    session = loopback.wrap(model, optimizer, **SMALL)
    other = torch.optim.SGD([model[2].weight], lr=0.1)
    with pytest.raises(PluginError, match=r"parameter '2.weight' is in two optimizers"):
        session.add_optimizer(other, torch.optim.SGD, cross=True)
    session.close()


def test_two_optimizers_of_one_model(loopback: Loopback) -> None:
    def train(model: nn.Sequential, optimizers: list[Optimizer]) -> None:
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(inputs(step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()

    def optimizers_of(model: nn.Sequential) -> list[Optimizer]:
        front = torch.optim.SGD(model[0].parameters(), lr=0.2, momentum=0.9)
        back = torch.optim.AdamW([*model[2].parameters(), *model[3].parameters()], lr=0.01)
        return [front, back]

    ours, plain = mlp(), mlp()
    first, second = optimizers_of(ours)
    session = loopback.wrap(ours, first, **SMALL)
    session.add_optimizer(second, torch.optim.AdamW, cross=True)
    train(ours, [first, second])
    session.flush()
    train(plain, optimizers_of(plain))
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    session.close()


def test_closed_the_optimizer_is_as_it_was(ours: Training, plain: Training) -> None:
    assert ours.session is not None
    ours.session.close()
    assert not ours.optimizer._optimizer_step_pre_hooks
    assert not ours.optimizer._optimizer_step_post_hooks
    ours.train()
    plain.train()
    assert not any(is_held(parameter) for parameter in ours.model.parameters())
    check_equal(ours, plain)
