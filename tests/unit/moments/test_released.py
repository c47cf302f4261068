"""What stands for a gradient that was folded: reads are refused, what needs no values is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bytesched.errors import PluginError
from bytesched.plugins.moments.slots import stand_in


def released() -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(torch.zeros(3, 4))
    parameter.grad = stand_in("a.weight", parameter, None)
    return parameter, parameter.grad


@pytest.mark.parametrize(
    "read",
    [
        torch.norm,
        torch.Tensor.tolist,
        torch.Tensor.clone,
        torch.Tensor.numpy,
        copy.deepcopy,
        lambda grad: grad.mul_(2),
        lambda grad: grad.data,
        lambda grad: torch._foreach_norm([grad]),
        lambda grad: torch.ones(3, 4).copy_(grad),
        lambda grad: grad.as_subclass(torch.Tensor),
    ],
)
def test_every_read_is_refused(read: Callable[[Any], object]) -> None:
    _, grad = released()
    with pytest.raises(PluginError, match="has been folded into Adam's moments"):
        read(grad)


def test_it_looks_like_a_gradient_and_has_no_memory() -> None:
    parameter, grad = released()
    assert grad.shape == parameter.shape
    assert grad.dtype is parameter.dtype
    with torch._C.DisableTorchFunctionSubclass():
        assert grad.untyped_storage().nbytes() == 4


def test_what_does_not_ask_python_sees_nan() -> None:
    _, grad = released()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.isnan(grad).all()


@pytest.mark.parametrize(
    "zero", [lambda grad: grad.zero_(), lambda grad: torch._foreach_zero_([grad])]
)
def test_zeroed_it_is_an_ordinary_one(zero: Callable[[Any], object]) -> None:
    parameter, grad = released()
    zero(grad)
    assert type(grad) is torch.Tensor
    assert parameter.grad is grad
    assert not grad.any()
    grad.add_(1)
    assert grad.sum() == 12


def test_one_is_made_until_it_is_an_ordinary_one() -> None:
    parameter, grad = released()
    assert stand_in("a.weight", parameter, grad) is grad
    grad.zero_()
    assert stand_in("a.weight", parameter, grad) is not grad
