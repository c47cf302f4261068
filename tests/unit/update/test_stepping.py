"""Stepping: `step()` arms what is on the wire, and does at once what cannot wait."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from fake_wire import Run, inputs, mlp, sgd
from torch import Tensor, nn
from torch.optim import Optimizer

Pair = Callable[..., tuple[Run, Run]]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.optim.Adam, "step"),
        (torch.optim.Adam, "_init_group"),
        (sys.modules["torch.optim.adam"], "_single_tensor_adam"),
    ],
)
def test_code_that_is_replaced_after_the_wrap_steps_whole(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
) -> None:
    runs = ours, plain = pair(3, optimizer_of=partial(torch.optim.Adam, lr=0.01, foreach=False))
    calls: list[Run] = []
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(run)
        return original(*args, **kwargs)

    before = ours.crossed
    monkeypatch.setattr(owner, name, replaced)
    for run in runs:
        run.train(2)
    assert ours.crossed == before
    assert [sum(call is run for call in calls) for run in runs] == [2, 2]
    assert caplog.text.count("has been replaced, after bytesched.wrap: step() waits") == 1
    assert ours.differences(plain) == []


# -- closures --------------------------------------------------------------------------


def evaluating(run: Run, seed: int) -> Callable[[], Any]:
    """A closure as trainers have it: everything from zero_grad() to backward() is in it."""

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss: Tensor = run.model(inputs(seed)).square().mean()
        loss.backward()
        return loss

    return closure


def grouped(parameters: Iterable[Tensor]) -> Optimizer:
    first, *others = parameters
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.5}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("optimizer_of", [sgd, grouped])
@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_closure_puts_on_the_wire_is_not_waited_for(
    pair: Pair, optimizer_of: Any, by_name: bool
) -> None:
    ours, plain = pair(0, optimizer_of=optimizer_of)
    for run in (plain, ours):
        step: Any = run.optimizer.step
        for seed in range(4):
            closure = evaluating(run, seed)
            run.see(step(closure=closure) if by_name else step(closure))
    assert len(ours.held) == len(ours.slots)
    assert ours.differences(plain) == []


def hooked(run: Run, *, before: bool) -> None:
    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        run.see(optimizer.param_groups[0]["params"][0].grad)
        optimizer.param_groups[0]["lr"] *= 0.5

    register = "register_step_pre_hook" if before else "register_step_post_hook"
    getattr(run.optimizer, register)(look)
    for seed in range(3):
        run.optimizer.step(evaluating(run, seed))
    # The first of these steps alone is whole: from then on ours is the last hook.
    assert run.wire is None or run.held


def raising(run: Run, *, after_backward: bool) -> None:
    def closure() -> float:
        if after_backward:
            evaluating(run, 5)()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.optimizer.step(closure)
    for seed in range(2):
        run.optimizer.step(evaluating(run, seed))


def doing_nothing(run: Run) -> None:
    """As trainers pass one in manual optimisation; and one that skips its batch."""
    run.optimizer.zero_grad()
    run.backward()
    step: Any = run.optimizer.step
    assert step(lambda: None) is None
    assert run.wire is None or len(run.held) == len(run.slots)
    step(run.optimizer.zero_grad)
    run.train()


def changing_its_optimizer(run: Run) -> None:
    state = copy.deepcopy(run.optimizer.state_dict())
    run.train()

    def closure() -> Any:
        run.optimizer.load_state_dict(state)
        run.optimizer.param_groups[0]["lr"] = 0.3
        return evaluating(run, 5)()

    run.optimizer.step(closure)
    run.train()


def of_two_optimizers(run: Run) -> None:
    first, second = run.optimizer, torch.optim.Adam(list(run.model.parameters())[3:], lr=0.01)
    first.param_groups[0]["params"] = list(run.model.parameters())[:3]
    run.add_optimizer(second)
    for seed in range(8):
        run.optimizer = (first, second)[seed % 2]
        run.optimizer.step(evaluating(run, seed))
    assert run.wire is None or len(run.held) == 3


CLOSURES: dict[str, Callable[[Run], None]] = {
    "a hook in front": partial(hooked, before=True),
    "a hook behind": partial(hooked, before=False),
    "raising at once": partial(raising, after_backward=False),
    "raising after backward": partial(raising, after_backward=True),
    "doing nothing": doing_nothing,
    "changing its optimizer": changing_its_optimizer,
    "of two optimizers": of_two_optimizers,
}


@pytest.mark.parametrize("name", CLOSURES)
def test_closures_do_what_they_would(pair: Pair, name: str) -> None:
    ours, plain = pair()
    # A backward pass of any model waits for what is on the wire.
    for run in (plain, ours):
        CLOSURES[name](run)
    assert ours.differences(plain) == []


class Inside(nn.Module):
    """All of a training is inside what the root calls, as in manual optimisation of a trainer."""

    optimizers: tuple[Optimizer, Optimizer]

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, seed: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            self.layers(inputs(seed)).square().mean().backward()
            optimizer.step()


def test_two_optimizers_over_one_forward_pass_of_the_root(pair: Pair) -> None:
    ours, plain = pair(0, make=Inside, optimizer_of=lambda p: torch.optim.SGD([next(iter(p))], 0.1))
    for run in (ours, plain):
        second = torch.optim.Adam(list(run.model.parameters())[1:], lr=0.01)
        run.add_optimizer(second)
        run.model.module.optimizers = run.optimizer, second
        for seed in range(4):
            run.model(seed)
    assert ours.differences(plain) == []
