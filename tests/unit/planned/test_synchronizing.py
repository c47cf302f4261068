"""Synchronizing: what is read waits for exactly what it needs, what is not read does not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopback import Loopback
from looped import TIMEOUT_S, Training, check_equal, inputs

from bytesched.plugins.proxies.pending import is_held


class Later:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.returned = threading.Event()
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.result = self._call()
        self.returned.set()

    def wait(self) -> Any:
        assert self.returned.wait(TIMEOUT_S), "it still waits"
        return self.result


def evaluated(training: Training) -> Any:
    training.model.eval()
    with torch.no_grad():
        output = training.model(inputs(9))
    training.model.train()
    return output


#: of an update that is outstanding
READS: dict[str, Callable[[Training], Any]] = {
    "weight": lambda training: training.model[3].weight.detach().clone(),
    "sum": lambda training: training.model[0].bias.sum().detach(),
    "forward": lambda training: training.model(inputs(9)).detach(),
    "evaluation": evaluated,
    "model's state": lambda training: training.model.state_dict()["2.weight"].clone(),
    "optimizer's state": lambda training: training.optimizer.state_dict()["state"][0][
        "momentum_buffer"
    ].clone(),
    "copy": lambda training: copy.deepcopy(training.model[2].weight).detach(),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_returns_after_the_update(
    loopback: Loopback, ours: Training, plain: Training, read: str
) -> None:
    loopback.hold()
    ours.train()
    later = Later(lambda: READS[read](ours))
    assert not later.returned.is_set()
    loopback.release()
    found = later.wait()
    plain.train()
    assert torch.equal(found, READS[read](plain))
    check_equal(ours, plain)


def test_looks_do_not_wait(loopback: Loopback, ours: Training) -> None:
    loopback.hold()
    ours.train()
    parameters = list(ours.model.parameters())
    assert all(is_held(parameter) for parameter in parameters)
    assert sum(parameter.numel() for parameter in parameters) > 0
    assert [parameter.shape for parameter in parameters]
    ours.optimizer.zero_grad()
    assert all(is_held(parameter) for parameter in parameters)


def test_a_gradient_is_read_when_it_is_reduced(
    loopback: Loopback, ours: Training, plain: Training
) -> None:
    loopback.hold()
    ours.backward()
    later = Later(lambda: [parameter.grad.clone() for parameter in ours.model.parameters()])
    assert not later.returned.is_set()
    loopback.release()
    plain.backward()
    gradients = [parameter.grad for parameter in plain.model.parameters()]
    assert all(map(torch.equal, later.wait(), gradients))
    for training in (ours, plain):
        training.optimizer.step()
    check_equal(ours, plain)


def test_a_gradient_is_read_after_the_update_that_needs_it(
    loopback: Loopback, ours: Training, plain: Training
) -> None:
    loopback.hold()
    ours.train()
    later = Later(lambda: ours.model[0].weight.grad.mul_(2.0).clone())
    loopback.release()
    plain.train()
    assert torch.equal(later.wait(), 2 * plain.model[0].weight.grad)
    check_equal(ours, plain)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_does_not_reach_the_update(
    loopback: Loopback, ours: Training, plain: Training, set_to_none: bool
) -> None:
    loopback.hold()
    ours.train()
    ours.optimizer.zero_grad(set_to_none=set_to_none)
    loopback.release()
    plain.train()
    check_equal(ours, plain)
    ours.train(2)
    plain.train(2)
    check_equal(ours, plain)


def test_after_evaluation_no_parameter_is_pending(loopback: Loopback, ours: Training) -> None:
    loopback.hold()
    ours.train()
    loopback.release()
    evaluated(ours)
    assert not any(is_held(parameter) for parameter in ours.model.parameters())


def test_a_write_comes_after_the_update(
    loopback: Loopback, ours: Training, plain: Training
) -> None:
    def halve(training: Training) -> None:
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(0.5)

    loopback.hold()
    ours.train()
    later = Later(lambda: halve(ours))
    loopback.release()
    later.wait()
    plain.train()
    halve(plain)
    check_equal(ours, plain)
