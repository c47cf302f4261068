"""Steps of classes that their users vouch for: what they see, and what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loopback import Loopback
from looped import Training, check_equal, inputs, weights
from torch import nn
from torch.optim import SGD, Optimizer

import bytesched
from bytesched.errors import PluginError
from bytesched.plugins.planned.stepping import why_now
from bytesched.plugins.proxies.pending import is_held


@bytesched.separable
class Scaled(Optimizer):
    """By an attribute, a hyper-parameter and an argument."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.factor: Any = 1.0
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        first = self.param_groups[0]["lr"]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += scale != 1.0
        for group in self.param_groups:
            lr = group["lr"]() if callable(group["lr"]) else group["lr"]
            assert callable(first) == callable(group["lr"])
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-lr * self.factor * scale)
        return loss if loss is not None else len(self.param_groups[0]["params"])


def scaled(model: nn.Module) -> Scaled:
    return Scaled(model.parameters())


def pair(loopback: Loopback, **fields: Any) -> tuple[Training, Training]:
    """Ours and the plain one, after the first round."""
    both = Training(loopback, scaled, **fields), Training(None, scaled)
    for training in both:
        training.train(3)
        training.flush()
    return both


def are_held(training: Training) -> bool:
    return any(is_held(p) for p in training.optimizer.param_groups[0]["params"])


def test_an_attribute_is_that_of_the_step(loopback: Loopback) -> None:
    ours, plain = pair(loopback)
    for training in (plain, ours):
        if training is ours:
            loopback.hold()
        training.train()
        training.optimizer.factor = 100.0  # type: ignore[attr-defined]
    assert are_held(ours)
    loopback.release()
    check_equal(ours, plain)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((None, 0.25), {}), ((), {"scale": 0.25}), ((None,), {"scale": 0.25})]
)
def test_a_step_with_arguments_is_the_users_own(loopback: Loopback, args: Any, kwargs: Any) -> None:
    ours, plain = pair(loopback)
    returned = []
    for training in (ours, plain):
        training.backward()
        returned.append(training.optimizer.step(*args, **kwargs))
    assert not are_held(ours)
    assert returned[0] == returned[1] == len(weights(plain.model))
    assert ours.optimizer.steps == plain.optimizer.steps == 1  # type: ignore[attr-defined]
    check_equal(ours, plain)
    assert ours.session is not None
    ours.train()
    plain.train()
    check_equal(ours, plain)


def test_a_number_in_place_of_a_closure_is_passed_on(loopback: Loopback) -> None:
    ours = Training(loopback)
    ours.train(3)
    ours.backward()
    with pytest.raises(TypeError, match="not callable"):
        ours.optimizer.step(0.25)  # type: ignore[call-overload]


def test_a_closure_beside_arguments_is_evaluated_once(loopback: Loopback) -> None:
    ours, plain = pair(loopback)
    losses = []
    for training in (ours, plain):
        calls: list[int] = []

        def closure(training: Training = training, calls: list[int] = calls) -> Any:
            calls.append(1)
            training.optimizer.zero_grad()
            loss = training.model(inputs(9)).square().mean()
            loss.backward()
            return loss.detach()

        optimizer: Any = training.optimizer
        losses.append(optimizer.step(closure, scale=0.5))
        assert calls == [1]
        losses.append(optimizer.step(closure))
        assert calls == [1, 1]
    assert losses[:2] == losses[2:]
    check_equal(ours, plain)


def test_a_group_that_holds_a_function_steps_whole(loopback: Loopback) -> None:
    ours, plain = pair(loopback)
    for training in (ours, plain):
        rates = [0.01, 100.0]
        training.optimizer.param_groups[0]["lr"] = lambda rates=rates: rates[0]
        training.train()
        rates[0] = rates[1]
    assert not are_held(ours)
    assert "a parameter group holds 'lr'" in why_now(ours.optimizer)
    check_equal(ours, plain)


class Related(SGD):
    """Reads something else of the model in each update."""

    read: Any

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        factor = float(self.read().abs().mean())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * factor)


READS: dict[str, Any] = {
    "weight": lambda model, _: model[0].weight,
    "gradient": lambda model, _: model[0].weight.grad,
    "state": lambda model, optimizer: torch.ones(1 + len(optimizer.state)),
}


@pytest.mark.parametrize("what", READS)
def test_an_update_that_waits_for_another_is_an_error_at_once(
    loopback: Loopback, what: str
) -> None:
    bytesched.separable(Related)

    def related(model: nn.Module) -> Optimizer:
        optimizer = Related(model.parameters(), lr=0.1)
        optimizer.read = lambda: torch.ones(1)
        return optimizer

    ours = Training(loopback, related)
    ours.train(2)
    ours.flush()
    loopback.hold()
    ours.backward()
    optimizer: Any = ours.optimizer
    is_stepping = True

    def read() -> Any:
        # Only the updates read: what the step itself would, waits for nothing.
        return torch.ones(1) if is_stepping else READS[what](ours.model, optimizer)

    optimizer.read = read
    optimizer.step()
    is_stepping = False
    loopback.release()
    with pytest.raises(PluginError, match="does not update each parameter on its own"):
        ours.flush()


def test_a_checkpoint_that_was_loaded_and_is_kept_is_no_reason_to_wait(loopback: Loopback) -> None:
    """It has the tensors of the state: plain training writes them, and nobody reads them there."""
    ours = Training(loopback, lambda model: torch.optim.Adam(model.parameters()))
    ours.train(3)
    checkpoint = ours.optimizer.state_dict()
    state: Any = ours.optimizer.state
    assert state.is_kept()
    ours.optimizer.load_state_dict(checkpoint)
    ours.optimizer.state_dict()
    loaded: Any = ours.optimizer.state
    assert not loaded.is_kept()
