"""Parameters that wait: any use of the values synchronizes them, and nothing else does."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from waiting_tensors import LOOKS, USES, Update, unpickled

from bytesched.plugins.proxies.pending import PendingParameter, hold, is_held, release


@pytest.fixture
def parameter() -> Iterator[nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.full((2, 3), 5.0)
    yield parameter
    release(parameter)


@pytest.fixture
def update(parameter: nn.Parameter) -> Update:
    update = Update(parameter.detach())
    hold(parameter, update.synchronize)
    return update


@pytest.mark.parametrize("use", USES)
def test_a_use_of_the_values_synchronizes(
    parameter: nn.Parameter, update: Update, use: str
) -> None:
    assert is_held(parameter)
    assert USES[use](parameter)
    assert update.calls == 1
    assert type(parameter) is nn.Parameter
    assert USES[use](parameter)
    assert update.calls == 1


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_that_needs_no_value_does_not_wait(
    parameter: nn.Parameter, update: Update, look: str
) -> None:
    assert LOOKS[look](parameter)
    assert update.calls == 0
    assert is_held(parameter)


def test_a_copy_is_no_pending_parameter(parameter: nn.Parameter, update: Update) -> None:
    assert type(copy.deepcopy(parameter)) is nn.Parameter
    hold(parameter, update.synchronize)
    assert type(unpickled(parameter)) is nn.Parameter


def test_all_parameters_of_a_call_are_settled(parameter: nn.Parameter, update: Update) -> None:
    other = nn.Parameter(torch.zeros(2, 3))
    theirs = Update(other.detach())
    hold(other, theirs.synchronize)
    assert torch.equal(parameter, other)
    assert (update.calls, theirs.calls) == (1, 1)
    assert not is_held(other)


def test_an_error_of_the_update_is_raised_where_it_is_used(parameter: nn.Parameter) -> None:
    def fail() -> None:
        raise ArithmeticError("lost")

    hold(parameter, fail)
    with pytest.raises(ArithmeticError, match="lost"):
        parameter.sum()
    # It is still to be raised at the next use.
    assert is_held(parameter)


def test_released_it_is_a_parameter(parameter: nn.Parameter, update: Update) -> None:
    release(parameter)
    assert type(parameter) is nn.Parameter
    assert parameter.sum() == 0
    assert update.calls == 0
    assert not isinstance(parameter, PendingParameter)
