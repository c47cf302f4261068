"""A model whose gradients are folded into moments, and what stands for those gradients."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_wire import FakeWire, inputs, mlp
from torch import nn

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.observe import Observers
from bytesched.plugins.moments.session import FoldedSession
from bytesched.plugins.moments.slots import Accumulation, MomentSlot
from bytesched.plugins.planned.terms import Terms
from bytesched.plugins.proxies.pending import PendingParameter
from bytesched.tunable import Setting

MICRO_BATCHES = 2


class Folded:
    """One of two ranks that see the same."""

    def __init__(self, bucket_bytes: int = 1000) -> None:
        self.wire = FakeWire()
        self.model = mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.slots = [MomentSlot(*named) for named in self.model.named_parameters()]
        self.session = FoldedSession(
            self.model,
            Terms(
                self.slots,
                Config(policy="fifo"),
                self.wire,
                Observers(),
                Setting(bucket_bytes, 2 * bucket_bytes),
            ),
            Accumulation(self.optimizer, MICRO_BATCHES),
        )
        self.session.add_optimizer(self.optimizer, type(self.optimizer), cross=True)

    def mini_batch(self, number: int) -> None:
        for micro in range(MICRO_BATCHES):
            loss = self.model(inputs(MICRO_BATCHES * number + micro)).square().mean()
            (loss / MICRO_BATCHES).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def held(self) -> list[str]:
        return [slot.name for slot in self.slots if type(slot.parameter) is PendingParameter]


@pytest.fixture
def folded() -> Iterator[Folded]:
    made = Folded()
    yield made
    made.session.close()


def test_updates_are_owed_until_moments_are_summed(folded: Folded) -> None:
    folded.mini_batch(0)
    folded.session.flush()
    started = len(folded.wire.started)
    folded.mini_batch(1)
    assert folded.held == [slot.name for slot in folded.slots]
    assert len(folded.wire.started) > started
    # A read waits for what it needs.
    assert all(bool(parameter.isfinite().all()) for parameter in folded.model.parameters())
    assert not folded.held


def test_twice_as_many_numbers_are_sent_as_the_model_has(folded: Folded) -> None:
    folded.mini_batch(0)
    assert sum(sent.numel() for sent in folded.wire.started) == 2 * sum(
        p.numel() for p in folded.model.parameters()
    )


def test_the_first_buckets_are_let_go_of(folded: Folded) -> None:
    before = _bucket_bytes(folded)
    folded.mini_batch(0)
    folded.session.flush()
    gc.collect()
    nbytes = 2 * sum(p.nbytes for p in folded.model.parameters())
    assert _bucket_bytes(folded) == before == nbytes
    storages = {slot.mean.untyped_storage().data_ptr() for slot in folded.slots}
    buckets = {bucket.address for bucket in folded.session.source.buckets}
    assert storages == buckets
    for slot in folded.slots:
        entry: Any = folded.optimizer.state[slot.parameter]
        assert entry["exp_avg"] is slot.mean
        assert entry["exp_avg_sq"] is slot.square


def _bucket_bytes(folded: Folded) -> int:
    return sum(bucket.buffer.nbytes for bucket in folded.session.source.buckets)


def test_in_a_forked_child_gradients_are_ordinary_ones(folded: Folded) -> None:
    folded.mini_batch(0)
    folded.session.flush()
    folded.session.disown()
    folded.model(inputs(5)).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in folded.model.parameters())


def test_when_it_is_closed_nothing_is_refused_or_folded(folded: Folded) -> None:
    for micro in range(MICRO_BATCHES):
        folded.model(inputs(micro)).square().mean().backward()
    folded.session.flush()
    folded.session.close()
    assert all(p.grad is None for p in folded.model.parameters())
    folded.model(inputs(5)).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in folded.model.parameters())


def released() -> tuple[MomentSlot, Any]:
    parameter = nn.Parameter(torch.zeros(3, 4))
    slot = MomentSlot("a.weight", parameter)
    slot.release()
    return slot, parameter.grad


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
    slot, grad = released()
    assert grad.shape == slot.parameter.shape
    assert grad.dtype is slot.parameter.dtype
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
    slot, grad = released()
    zero(grad)
    assert type(grad) is torch.Tensor
    assert slot.parameter.grad is grad
    assert not grad.any()
    grad.add_(1)
    assert grad.sum() == 12


def test_one_is_made_until_it_is_an_ordinary_one() -> None:
    slot, grad = released()
    slot.release()
    assert id(slot.parameter.grad) == id(grad)
    grad.zero_()
    slot.release()
    assert id(slot.parameter.grad) != id(grad)
