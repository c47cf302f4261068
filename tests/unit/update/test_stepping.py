"""Stepping: `step()` arms what is on the wire, and does at once what cannot wait."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopback import Loopback
from looped import SMALL, Training, check_equal, inputs, mlp, sgd
from torch import Tensor, nn
from torch.optim import Optimizer

from bytesched.plugins.proxies.pending import is_held


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def grouped(model: nn.Module) -> Optimizer:
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.5}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.1)


def test_what_other_processes_have_is_updated_at_once(
    loopback: Loopback, ours: Training, plain: Training
) -> None:
    ours.flush()
    ours.model.share_memory()
    before = ours.crossed_steps()
    loopback.hold()
    release = threading.Timer(0.2, loopback.release)
    release.start()
    for training in (ours, plain):
        training.train()
    assert ours.crossed_steps() == before
    release.join()
    check_equal(ours, plain)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.optim.Adam, "step"),
        (torch.optim.Adam, "_init_group"),
        (sys.modules["torch.optim.adam"], "_single_tensor_adam"),
    ],
)
def test_code_that_is_replaced_after_the_wrap_steps_whole(
    loopback: Loopback,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
) -> None:
    def adam(model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)

    ours, plain = Training(loopback, adam), Training(None, adam)
    calls: list[Training] = []
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(training)
        return original(*args, **kwargs)

    for training in (ours, plain):
        training.train(3)
    ours.flush()
    before = ours.crossed_steps()
    monkeypatch.setattr(owner, name, replaced)
    loopback.hold()
    release = threading.Timer(0.2, loopback.release)
    release.start()
    for training in (ours, plain):
        training.train(2)
    release.join()
    assert ours.crossed_steps() == before
    assert calls.count(ours) == calls.count(plain) == 2
    assert caplog.text.count("has been replaced, after bytesched.wrap: step() waits") == 1
    check_equal(ours, plain)


def evaluating(training: Training, seed: int) -> Callable[[], Any]:
    """A closure as trainers have it: everything from zero_grad() to backward() is in it."""

    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss: Tensor = training.model(inputs(seed)).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("optimizer_of", [sgd, adamw, grouped])
@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_closure_puts_on_the_wire_is_not_waited_for(
    loopback: Loopback, optimizer_of: Any, by_name: bool
) -> None:
    ours, plain = Training(loopback, optimizer_of), Training(None, optimizer_of)
    losses: list[list[Any]] = [[], []]
    for training, seen in ((ours, losses[0]), (plain, losses[1])):
        for seed in range(4):
            if training is ours and seed == 3:
                training.flush()
                loopback.hold()
            closure = evaluating(training, seed)
            step: Any = training.optimizer.step
            seen.append(step(closure=closure) if by_name else step(closure))
        if training is ours:
            assert all(is_held(parameter) for parameter in ours.model.parameters())
            loopback.release()
    assert all(map(torch.equal, *losses))
    check_equal(ours, plain)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_users_hooks_run_beside_a_closure(ours: Training, plain: Training, moment: str) -> None:
    seen: list[Tensor] = []

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        weight = optimizer.param_groups[0]["params"][0]
        seen.append(weight.grad.clone())
        optimizer.param_groups[0]["lr"] *= 0.5

    for training in (ours, plain):
        if moment == "before":
            training.optimizer.register_step_pre_hook(look)
        else:
            training.optimizer.register_step_post_hook(look)
        for seed in range(3):
            training.optimizer.step(evaluating(training, seed))
    assert all(map(torch.equal, seen[:3], seen[3:]))
    check_equal(ours, plain)


@pytest.mark.parametrize("backward", [False, True])
def test_a_closure_that_raises_leaves_training_as_it_would(
    ours: Training, plain: Training, backward: bool
) -> None:
    for training in (ours, plain):

        def closure(training: Training = training) -> None:
            if backward:
                evaluating(training, 5)()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            training.optimizer.step(closure)  # type: ignore[arg-type]
        for seed in range(2):
            training.optimizer.step(evaluating(training, seed))
    check_equal(ours, plain)


def test_a_closure_may_do_nothing(loopback: Loopback, ours: Training, plain: Training) -> None:
    """As trainers pass one in manual optimisation; and one that skips its batch."""
    before = ours.crossed_steps()
    # In this order: a backward pass of any model waits for what is on the wire.
    for training in (plain, ours):
        if training is ours:
            loopback.hold()
        training.backward()
        step: Any = training.optimizer.step
        assert step(lambda: None) is None
    assert ours.crossed_steps() == before + 1
    loopback.release()
    for training in (ours, plain):
        training.optimizer.step(training.optimizer.zero_grad)  # type: ignore[arg-type]
        training.train()
    check_equal(ours, plain)


def test_what_a_closure_changes_of_its_optimizer_counts(ours: Training, plain: Training) -> None:
    for training in (ours, plain):
        state = copy.deepcopy(training.optimizer.state_dict())
        training.train()

        def closure(training: Training = training, state: Any = state) -> Any:
            training.optimizer.load_state_dict(state)
            training.optimizer.param_groups[0]["lr"] = 0.3
            return evaluating(training, 5)()

        training.optimizer.step(closure)
        training.train()
    check_equal(ours, plain)


def test_two_optimizers_with_a_closure_each(loopback: Loopback) -> None:
    trained: list[Training] = []
    for training in (Training(None), Training(loopback)):
        weights = list(training.model.parameters())
        training.optimizer.param_groups[0]["params"] = weights[:3]
        second = torch.optim.Adam(weights[3:], lr=0.01)
        if training.session is not None:
            training.session.add_optimizer(second, type(second), cross=True)
        for seed in range(4):
            training.optimizer.step(evaluating(training, seed))

            def closure(training: Training = training, seed: int = seed) -> Tensor:
                second.zero_grad()  # noqa: B023 - called at once
                loss: Tensor = training.model(inputs(seed + 9)).square().mean()
                loss.backward()
                return loss

            if training.session is not None and seed == 3:
                training.flush()
                loopback.hold()
            second.step(closure)
        trained.append(training)
    plain, ours = trained
    assert all(is_held(weight) for weight in list(ours.model.parameters())[3:])
    loopback.release()
    check_equal(ours, plain)


def test_two_optimizers_over_one_forward_pass_of_the_root(loopback: Loopback) -> None:
    """As in manual optimisation of a trainer: all of it is inside what the root calls."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()
            first, *others = self.parameters()
            self.optimizers = torch.optim.SGD([first], lr=0.1), torch.optim.Adam(others, lr=0.01)

        def forward(self, seed: int) -> None:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
                self.layers(inputs(seed)).square().mean().backward()
                optimizer.step()

    ours, plain = Inside(), Inside()
    session = loopback.wrap(ours, ours.optimizers[0], **SMALL)
    session.add_optimizer(ours.optimizers[1], torch.optim.Adam, cross=True)
    for seed in range(4):
        ours(seed)
        plain(seed)
    session.flush()
    assert all(map(torch.equal, ours.state_dict().values(), plain.state_dict().values()))


def test_a_closure_under_loss_scaling_is_refused_as_torch_does(ours: Training) -> None:
    scaler = torch.amp.GradScaler("cpu")
    ours.backward()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(ours.optimizer, closure=lambda: None)


def test_closed_the_optimizer_is_as_it_was(ours: Training, plain: Training) -> None:
    assert ours.session is not None
    ours.session.close()
    assert not ours.optimizer._optimizer_step_pre_hooks
    assert not ours.optimizer._optimizer_step_post_hooks
    ours.train()
    plain.train()
    assert not any(is_held(parameter) for parameter in ours.model.parameters())
    check_equal(ours, plain)
