"""Gradients and parameters that wait: any use of the values waits, and nothing else does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _has_foreach_support
from waiting_tensors import LOOKS, USES, Update, saved, unpickled

from bytesched.plugins.proxies.entries import guard_entries
from bytesched.plugins.proxies.pending import PendingParameter, hold, is_held, release
from bytesched.plugins.proxies.pending_grads import PendingGrad, make_plain


class Ones:
    """A sum that is ones when it is settled."""

    def __init__(self, grad: Any, *, is_taken: bool = False) -> None:
        self.calls = 0
        #: by function, of what need not wait
        self.answers: dict[Any, Any] = {}
        self._grad = grad
        self._is_taken = is_taken
        self._grad.__class__ = PendingGrad
        self._grad.sum_ = self

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.answers.get(func, NotImplemented)

    def settle(self) -> None:
        self.calls += 1
        make_plain(self._grad)
        self._grad.fill_(1.0)

    def zeroes(self) -> bool:
        if self._is_taken:
            make_plain(self._grad)
        return self._is_taken


def pending(*, is_taken: bool = False) -> tuple[Any, Ones]:
    grad = torch.zeros(2, 3)
    return grad, Ones(grad, is_taken=is_taken)


@pytest.mark.parametrize("use", [use for use in USES if use not in {"module", "state_dict"}])
def test_a_use_of_the_values_settles(use: str) -> None:
    guard_entries()
    grad, ones = pending()
    assert USES[use](grad)
    assert ones.calls == 1
    assert type(grad) is Tensor
    assert USES[use](grad)
    assert ones.calls == 1


def test_what_is_answered_settles_nothing() -> None:
    (grad, ones), (other, others) = pending(), pending()
    ones.answers[torch.Tensor.norm] = torch.tensor(3.0)
    ones.answers[torch._foreach_norm] = [torch.tensor(4.0), torch.tensor(5.0)]
    assert float(grad.norm()) == 3.0
    assert [float(one) for one in torch._foreach_norm([grad, other])] == [4.0, 5.0]
    assert (ones.calls, others.calls) == (0, 0)
    assert type(grad) is type(other) is PendingGrad
    # The first one is asked, and has no answer.
    torch._foreach_norm([other, grad])
    assert (ones.calls, others.calls) == (1, 1)


@pytest.mark.parametrize(
    "look", ["shape", "size", "numel", "len", "dtype", "device", "stride", "requires_grad"]
)
def test_a_look_that_needs_no_value_does_not_wait(look: str) -> None:
    grad, ones = pending()
    assert LOOKS[look](grad) in (True, False)
    assert ones.calls == 0
    assert type(grad) is PendingGrad


def test_whoever_refers_to_it_waits_with_it() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    grad, ones = pending()
    parameter.grad = grad
    assert type(parameter.grad) is PendingGrad
    assert (parameter.grad + 1).sum() == 12
    assert (grad + 1).sum() == 12
    assert ones.calls == 1
    assert type(parameter.grad) is type(grad) is Tensor


def test_it_takes_the_ways_of_a_plain_gradient() -> None:
    grad, ones = pending()
    assert _has_foreach_support([grad], torch.device("cuda"))
    assert type(grad) == Tensor  # noqa: E721
    assert type(grad) in [Tensor, nn.Parameter]
    assert type(grad) not in {Tensor}
    assert ones.calls == 0


@pytest.mark.parametrize("make", [copy.deepcopy, saved, unpickled, torch.clone, torch.norm])
def test_what_is_made_of_it_is_plain(make: Any) -> None:
    grad, ones = pending()
    assert type(make(grad)) is Tensor
    assert ones.calls == 1


def test_all_of_a_call_are_settled_parameters_too() -> None:
    (one, first), (two, second) = pending(), pending()
    parameter = nn.Parameter(torch.zeros(2, 3))
    applied: list[int] = []
    hold(parameter, lambda: applied.append(1))
    assert torch.stack([one, two, parameter]).sum() == 12
    assert (first.calls, second.calls, applied) == (1, 1, [1])
    assert not is_held(parameter)


@pytest.mark.parametrize("zero", [Tensor.zero_, lambda grad: torch._foreach_zero_([grad])])
@pytest.mark.parametrize("is_taken", [False, True])
def test_zeroing_waits_if_no_update_has_taken_the_sum(zero: Any, is_taken: bool) -> None:
    grad, ones = pending(is_taken=is_taken)
    zero(grad)
    assert ones.calls == (not is_taken)
    assert type(grad) is Tensor
    assert not grad.any()


def test_filling_is_no_zeroing() -> None:
    """Whatever the value."""
    grad, ones = pending(is_taken=True)
    grad.fill_(0.0)
    assert ones.calls == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.set_(torch.full((2, 3), 2.0)),
        lambda grad: grad.as_subclass(nn.Parameter),
        lambda grad: grad.resize_(6),
        lambda grad: setattr(grad, "data", torch.full((2, 3), 2.0)),
    ],
    ids=["set_", "as_subclass", "resize_", "data"],
)
def test_other_memory_and_another_class_wait(change: Any) -> None:
    grad, ones = pending()
    change(grad)
    assert ones.calls == 1
    assert type(grad) is Tensor


def test_an_error_of_the_sum_is_raised_at_every_read() -> None:
    grad, ones = pending()

    def fail() -> None:
        raise ArithmeticError("lost")

    ones.settle = fail  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="lost"):
            grad.sum()
    assert type(grad) is PendingGrad


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
def test_a_look_at_a_parameter_does_not_wait(
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
