"""Steps of classes that their users vouch for: what they see, and what they are given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fake_wire import Run, inputs
from torch import Tensor
from torch.optim import SGD, Optimizer

import bytesched
from bytesched.errors import PluginError
from bytesched.plugins.planned.stepping import why_now

Pair = Callable[..., tuple[Run, Run]]


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


def test_an_attribute_is_that_of_the_step(pair: Pair) -> None:
    ours, plain = pair(3, optimizer_of=Scaled)
    for run in (plain, ours):
        run.train()
        run.optimizer.factor = 100.0  # type: ignore[attr-defined]
    assert ours.held
    assert ours.differences(plain) == []


@pytest.mark.parametrize(
    ("args", "kwargs"), [((None, 0.25), {}), ((), {"scale": 0.25}), ((None,), {"scale": 0.25})]
)
def test_a_step_with_arguments_is_the_users_own(pair: Pair, args: Any, kwargs: Any) -> None:
    ours, plain = pair(3, optimizer_of=Scaled)
    for run in (plain, ours):
        optimizer: Any = run.optimizer
        optimizer.zero_grad()
        run.backward()
        assert optimizer.step(*args, **kwargs) == len(run.slots)
        assert run.held == []
        assert optimizer.steps == 1
        run.train()
    assert ours.differences(plain) == []


def test_a_number_in_place_of_a_closure_is_passed_on(pair: Pair) -> None:
    ours, _ = pair(3)
    ours.backward()
    with pytest.raises(TypeError, match="not callable"):
        ours.optimizer.step(0.25)  # type: ignore[call-overload]


def test_a_closure_beside_arguments_is_evaluated_once(pair: Pair) -> None:
    ours, plain = pair(3, optimizer_of=Scaled)
    for run in (plain, ours):
        calls: list[int] = []

        def closure(run: Run = run, calls: list[int] = calls) -> Any:
            calls.append(1)
            run.optimizer.zero_grad()
            loss = run.model(inputs(9)).square().mean()
            loss.backward()
            return loss

        optimizer: Any = run.optimizer
        for count, arguments in enumerate(({"scale": 0.5}, {}), 1):
            run.see(optimizer.step(closure, **arguments))
            assert len(calls) == count
    assert ours.differences(plain) == []


def test_a_group_that_holds_a_function_steps_whole(pair: Pair) -> None:
    ours, plain = pair(3, optimizer_of=Scaled)
    for run in (plain, ours):
        rates = [0.01, 100.0]
        run.optimizer.param_groups[0]["lr"] = lambda rates=rates: rates[0]
        run.train()
        rates[0] = rates[1]
    assert ours.held == []
    assert "a parameter group holds 'lr'" in why_now(ours.optimizer)
    assert ours.differences(plain) == []


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
def test_an_update_that_waits_for_another_is_an_error_at_once(pair: Pair, what: str) -> None:
    bytesched.separable(Related)

    def related(parameters: Iterable[Tensor]) -> Optimizer:
        optimizer = Related(parameters, lr=0.1)
        optimizer.read = lambda: torch.ones(1)
        return optimizer

    ours, _ = pair(optimizer_of=related)
    ours.optimizer.zero_grad()
    ours.backward()
    optimizer: Any = ours.optimizer
    # Only the updates read: what the step itself would, waits for nothing.
    is_stepping = True
    optimizer.read = lambda: (
        torch.ones(1) if is_stepping else READS[what](ours.model.module, optimizer)
    )
    optimizer.step()
    is_stepping = False
    with pytest.raises(PluginError, match="does not update each parameter on its own"):
        ours.session.flush()


@pytest.mark.parametrize("is_aside", [False, True])
def test_a_checkpoint_that_was_loaded_and_is_kept_is_no_reason_to_wait(
    pair: Pair, is_aside: bool
) -> None:
    """It has the tensors of the state: plain training writes them, and nobody reads them there.

    Nor is one that is loaded while DDP goes on by itself, when nothing of the old state stays.
    """
    ours, _ = pair(3, optimizer_of=torch.optim.Adam)
    checkpoint = ours.optimizer.state_dict()
    state: Any = ours.optimizer.state
    assert state.is_kept()
    ours.session.flush()
    if is_aside:
        ours.session._stepping.rest()
        assert not ours.optimizer._optimizer_step_pre_hooks
    ours.optimizer.load_state_dict(checkpoint)
    old = weakref.ref(state)
    del state
    gc.collect()
    assert old() is None
    if is_aside:
        ours.session._stepping.wake()
    ours.optimizer.state_dict()
    loaded: Any = ours.optimizer.state
    assert not loaded.is_kept()
