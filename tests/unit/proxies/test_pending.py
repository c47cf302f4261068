"""Gradients and parameters that wait: what is made of them, and what settles several at once.

That any use of the values waits, and nothing else does, is in test_hazards.py and test_fuzzed.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _has_foreach_support

from bytesched.plugins.proxies.pending import hold, is_held
from bytesched.plugins.proxies.pending_grads import PendingGrad, make_plain


class Ones:
    """What makes ones of a tensor of zeros when it is waited for."""

    def __init__(self, values: Tensor, *, is_taken: bool = False) -> None:
        self.calls = 0
        self.error: Exception | None = None
        #: by function, of what need not wait
        self.answers: dict[Any, Any] = {}
        self._values: Any = values
        self._is_taken = is_taken

    def settle(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        if type(self._values) is PendingGrad:
            make_plain(self._values)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._values.fill_(1.0)

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.answers.get(func, NotImplemented)

    def zeroes(self) -> bool:
        if self._is_taken:
            make_plain(self._values)
        return self._is_taken


def pending(*, is_taken: bool = False) -> tuple[Any, Ones]:
    grad: Any = torch.zeros(2, 3)
    ones = Ones(grad, is_taken=is_taken)
    grad.__class__ = PendingGrad
    grad.sum_ = ones
    return grad, ones


def held() -> tuple[nn.Parameter, Ones]:
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.full((2, 3), 5.0)
    ones = Ones(parameter.detach())
    hold(parameter, ones.settle)
    return parameter, ones


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def unpickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 (it has just been made)


KINDS: dict[str, Callable[[], tuple[Any, Ones]]] = {"gradient": pending, "parameter": held}


def test_a_held_parameter_is_one_and_has_its_own_gradient_and_hooks() -> None:
    parameter, ones = held()
    assert isinstance(parameter, nn.Parameter)
    assert parameter.grad is not None
    parameter.register_hook(lambda grad: None)
    torch.optim.SGD([parameter]).zero_grad()
    assert parameter.grad is None
    assert ones.calls == 0
    assert is_held(parameter)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [copy.deepcopy, saved, unpickled, torch.clone, torch.norm])
def test_what_is_made_of_it_is_plain(make: Any, kind: str) -> None:
    tensor, ones = KINDS[kind]()
    assert type(make(tensor)) in {Tensor, nn.Parameter}
    assert ones.calls == 1


def test_all_of_a_call_are_settled_parameters_too() -> None:
    found = [pending(), pending(), held(), held()]
    assert torch.stack([tensor for tensor, _ in found]).sum() == 24
    assert [ones.calls for _, ones in found] == [1] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_raised_at_every_use(kind: str) -> None:
    tensor, ones = KINDS[kind]()
    ones.error = ArithmeticError("lost")
    for calls in (1, 2):
        with pytest.raises(ArithmeticError, match="lost"):
            tensor.sum()
        assert ones.calls == calls


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


def test_it_takes_the_ways_of_a_plain_gradient() -> None:
    grad, ones = pending()
    assert _has_foreach_support([grad], torch.device("cuda"))
    assert type(grad) == Tensor  # noqa: E721
    assert type(grad) in [Tensor, nn.Parameter]
    assert type(grad) not in {Tensor}
    assert ones.calls == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.fill_(0.0),
        lambda grad: grad.set_(torch.full((2, 3), 2.0)),
        lambda grad: grad.as_subclass(nn.Parameter),
        lambda grad: grad.resize_(6),
        lambda grad: setattr(grad, "data", torch.full((2, 3), 2.0)),
    ],
    ids=["fill_", "set_", "as_subclass", "resize_", "data"],
)
def test_filling_other_memory_and_another_class_wait(change: Any) -> None:
    """Filling with zeros, too, is no zeroing."""
    grad, ones = pending(is_taken=True)
    change(grad)
    assert ones.calls == 1
    assert type(grad) is Tensor
