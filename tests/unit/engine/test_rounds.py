"""Rounds: every parameter takes part once, and what cannot be is an error with a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from looped import SMALL, Training, check_equal, inputs, weights

from bytesched.errors import PluginError, UnusedParameterError
from bytesched.testing import Loopback


def rounds_of(session: Any) -> Any:
    return session._rounds


class Boom(Exception):
    """A script's own."""


def boom(_: torch.Tensor) -> None:
    raise Boom


def test_each_backward_pass_is_a_round(ours: Training) -> None:
    rounds = rounds_of(ours.session)
    before = rounds.finished
    for number in range(1, 4):
        ours.backward()
        assert rounds.finished == before + number
        assert not rounds.incomplete
        ours.optimizer.step()


def test_backward_passes_that_complete_each_other_are_one_round(loopback: Loopback) -> None:
    """Two losses, each of half of the parameters."""
    found = []
    for wire in (loopback, None):
        training = Training(wire)
        halves = training.model[:2], training.model[2:]
        for step in range(3):
            training.optimizer.zero_grad()
            hidden = halves[0](inputs(step))
            if training.session is not None:
                # The call of the whole model is what begins a forward pass.
                training.model(inputs(step))
            halves[1](hidden.detach()).square().mean().backward()
            if training.session is not None:
                assert rounds_of(training.session).incomplete
            hidden.square().mean().backward()
            if training.session is not None:
                assert not rounds_of(training.session).incomplete
                assert rounds_of(training.session).finished == step + 1
            training.optimizer.step()
        found.append(training)
    check_equal(*found)
    assert found[0].session is not None
    found[0].session.close()


def test_a_parameter_without_gradient_is_named_at_the_step(ours: Training) -> None:
    ours.optimizer.zero_grad()
    ours.model[0](inputs(0)).sum().backward()
    with pytest.raises(UnusedParameterError, match=r"4 parameters got no gradient.*2\.weight"):
        ours.optimizer.step()


def test_where_it_may_happen_the_round_ends_without_it(loopback: Loopback) -> None:
    training = Training(None)
    training.session = loopback.wrap(training.model, training.optimizer, find_unused=True, **SMALL)
    before = weights(training.model)
    for step in range(3):
        training.optimizer.zero_grad()
        training.model[:2](inputs(step)).square().mean().backward()
        training.optimizer.step()
    assert rounds_of(training.session).finished == 3
    training.flush()
    after = weights(training.model)
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [False] * 2 + [
        True
    ] * 4
    training.session.close()


def test_a_second_gradient_in_a_round_is_refused(ours: Training) -> None:
    ours.optimizer.zero_grad()
    first = ours.model[0]
    total = (first(inputs(0)).sum(), first(inputs(1)).sum())
    total[0].backward()
    with pytest.raises(PluginError, match=r"second gradient.*rank 0"):
        total[1].backward()


def test_a_backward_pass_that_an_exception_ended_is_told_at_the_step(ours: Training) -> None:
    ours.optimizer.zero_grad()
    hidden = ours.model[:2](inputs(0))
    hidden.register_hook(boom)
    with pytest.raises(Boom):
        ours.model[2:](hidden).sum().backward()
    with pytest.raises(PluginError, match="an exception ended the last backward"):
        ours.optimizer.step()


def test_hooks_of_the_script_come_first(ours: Training, plain: Training) -> None:
    """What they do to a gradient is what is sent."""
    for training in (ours, plain):
        training.model[0].weight.register_hook(lambda grad: grad * 2)
        for _ in range(2):
            training.train()
    check_equal(ours, plain)
