"""Tensors that wait: any use of the values synchronizes them, and nothing else does."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bytesched.plugins.proxies import lazy_grads
from bytesched.plugins.proxies.lazy_grads import (
    LazyGrad,
    has_own_memory,
    keep_apart,
    lazy_over,
    plain,
)
from bytesched.plugins.proxies.pending import PendingParameter, hold, is_held, release


class Update:
    """One that is outstanding until it is settled: then the values are ones."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.calls = 0

    def synchronize(self) -> None:
        self.calls += 1
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.values.fill_(1.0)


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


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def unpickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 (it has just been made)


USES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum() == 6,
    "arithmetic": lambda p: (2 * p == 2).all(),
    "matmul": lambda p: (torch.ones(1, 2) @ p == 2).all(),
    "in a list": lambda p: (torch.cat([p, p]) == 1).all(),
    "behind one, in Python": lambda p: nn.functional.mse_loss(torch.zeros(2, 3), p) == 1,
    "behind one in a list": lambda p: (torch.block_diag(torch.zeros(1, 1), p)[1:, 1:] == 1).all(),
    "as a keyword": lambda p: (torch.add(torch.zeros(2, 3), other=p) == 1).all(),
    "foreach": lambda p: (torch._foreach_mul([p.detach()], 3.0)[0] == 3).all(),
    "detach": lambda p: (p.detach() == 1).all(),
    "data": lambda p: (p.data == 1).all(),
    "item": lambda p: p[0, 0].item() == 1,
    "numpy": lambda p: (p.detach().numpy() == 1).all(),
    "tolist": lambda p: p.tolist() == [[1.0] * 3] * 2,
    "clone": lambda p: (p.clone() == 1).all(),
    "data_ptr": lambda p: p.data_ptr() > 0,
    "repr": lambda p: "1., 1." in repr(p),
    "deepcopy": lambda p: (copy.deepcopy(p) == 1).all(),
    "pickle": lambda p: (unpickled(p) == 1).all(),
    "save": lambda p: (saved(p) == 1).all(),
    "state_dict": lambda p: (nn.ParameterList([p]).state_dict()["0"] == 1).all(),
    "module": lambda p: (nn.functional.linear(torch.ones(1, 3), p) == 3).all(),
}

LOOKS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: p.shape == (2, 3),
    "size": lambda p: p.size() == (2, 3) and p.size(0) == 2,
    "numel": lambda p: p.numel() == 6,
    "len": lambda p: len(p) == 2,
    "dtype": lambda p: p.dtype is torch.float32,
    "device": lambda p: p.device.type == "cpu",
    "stride": lambda p: p.stride() == (3, 1),
    "requires_grad": lambda p: p.requires_grad,
    "is_leaf": lambda p: p.is_leaf,
    "grad": lambda p: p.grad is not None,
    "zero_grad": lambda p: torch.optim.SGD([p]).zero_grad() is None and p.grad is None,
    "hook": lambda p: p.register_hook(lambda grad: None) is not None,
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "id": lambda p: {p: 1}[p] == 1,
}


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
