"""Gradients that wait: any use of the values synchronizes them, and nothing else does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from waiting_tensors import LOOKS, USES, Update, saved

from bytesched.plugins.proxies import lazy_grads
from bytesched.plugins.proxies.lazy_grads import (
    LazyGrad,
    has_own_memory,
    keep_apart,
    lazy_over,
    plain,
)


def lazy_of(memory: Tensor, *, taken: bool = False) -> tuple[LazyGrad, Update]:
    update = Update(memory)
    grad = lazy_over(memory)
    grad.synchronize = update.synchronize
    grad.is_taken = lambda: taken
    return grad, update


@pytest.mark.parametrize("use", [use for use in USES if use not in {"module", "state_dict"}])
def test_a_read_of_a_gradient_waits(use: str) -> None:
    grad, update = lazy_of(torch.zeros(2, 3))
    assert USES[use](grad)
    assert update.calls > 0


@pytest.mark.parametrize(
    "look", ["shape", "size", "numel", "len", "dtype", "device", "stride", "requires_grad"]
)
def test_a_look_at_a_gradient_does_not_wait(look: str) -> None:
    grad, update = lazy_of(torch.zeros(2, 3))
    LOOKS[look](grad)
    assert update.calls == 0


def test_what_is_made_of_a_gradient_is_an_ordinary_tensor() -> None:
    grad, _ = lazy_of(torch.zeros(2, 3))
    for made in (grad + 1, copy.deepcopy(grad), saved(grad), grad.clone(), grad.norm()):
        assert type(made) is Tensor
    assert "LazyGrad" not in repr(grad)
    # For code that takes its fast path for tensors alone.
    assert type(grad) == Tensor  # noqa: E721
    assert type(grad) in [Tensor, nn.Parameter]


def test_zeroing_a_gradient_that_is_not_taken_waits_and_zeroes_its_memory() -> None:
    memory = torch.full((2, 3), 7.0)
    grad, update = lazy_of(memory)
    grad.zero_()
    assert update.calls == 1
    assert not memory.any()
    assert not has_own_memory(grad)


@pytest.mark.parametrize("zero", [Tensor.zero_, lambda grad: torch._foreach_zero_([grad])])
def test_zeroing_a_gradient_that_is_taken_leaves_its_memory_alone(
    zero: Callable[[Tensor], object],
) -> None:
    memory = torch.full((2, 3), 7.0)
    grad, update = lazy_of(memory, taken=True)
    zero(grad)
    assert update.calls == 0
    assert (memory == 7).all()
    assert has_own_memory(grad)
    assert not grad.any()
    grad.add_(2.0)
    assert (memory == 7).all()


def test_kept_apart_it_has_the_values_and_other_memory() -> None:
    memory = torch.full((2, 3), 7.0)
    grad, update = lazy_of(memory)
    keep_apart(grad)
    memory.zero_()
    assert (grad == 7).all()
    assert has_own_memory(grad)
    assert update.calls == 0


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    "view_of",
    [
        lambda grad: grad.data,
        lambda grad: grad.view(-1),
        lambda grad: grad.unbind()[0],
    ],
    ids=["data", "view", "unbind"],
)
def test_what_is_written_through_a_view_is_seen_in_the_gradient(
    monkeypatch: pytest.MonkeyPatch, view_of: Callable[[Tensor], Tensor], alone: bool
) -> None:
    """Also where torch can give a gradient other memory, but not the views of it (`alone`)."""
    if alone:
        monkeypatch.setattr(lazy_grads, "moves_alone", lambda grad: True)
    memory = torch.full((2, 3), 7.0)
    grad, update = lazy_of(memory)
    view = view_of(grad)
    assert update.calls == 1
    memory.zero_()
    view.add_(2.0)
    assert (view == 3).all()
    assert (grad[0] == 3).all()
    assert not memory.any()


def test_the_plain_tensor_is_the_same_memory_and_does_not_wait() -> None:
    grad, update = lazy_of(torch.zeros(2, 3))
    assert type(plain(grad)) is Tensor
    with torch._C.DisableTorchFunctionSubclass():
        assert plain(grad).data_ptr() == grad.data_ptr()
    assert (plain(grad) == 0).all()
    assert update.calls == 0
    ordinary = torch.ones(1)
    assert plain(ordinary) is ordinary
