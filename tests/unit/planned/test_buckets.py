"""Buckets of a reducer: their chunks, and the gradients that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bytesched.plugins.planned.buckets import Bucket, Member
from bytesched.plugins.planned.cutting import Cut
from bytesched.plugins.proxies.pending_grads import PendingGrad


class Sums:
    """Lands what is asked for: the sum is twice what is in the bucket."""

    def __init__(self) -> None:
        self.settled: list[str] = []

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return NotImplemented

    def settle(self, member: Member) -> None:
        self.settled.append(member.name)
        member.bucket.buffer.mul_(2.0)
        member.bucket.hand_back()


def bucket_of(
    *parameters: nn.Parameter,
    holds_gradients: bool = False,
    ends: Sequence[int] | None = None,
    first: int = 0,
    names: Sequence[str] = "abcdefgh",
) -> Bucket:
    """Filled with 1, 2, 3, ..., a number for each parameter, and gradients as DDP leaves them."""
    numels = [parameter.numel() for parameter in parameters]
    buffer = torch.cat([torch.full((numel,), 1.0 + i) for i, numel in enumerate(numels)])
    views = list(buffer.split(numels))
    bucket = Bucket(
        *(Sums(), buffer, parameters, views),
        {id(parameter): name for parameter, name in zip(parameters, names, strict=False)},
        holds_gradients=holds_gradients,
        cut=lambda _, __, memory: list(map(Cut, [memory.numel()] if ends is None else ends)),
        first=first,
    )
    bucket.is_under_way = True
    for parameter, member in zip(parameters, bucket.members, strict=True):
        parameter.grad = member.view if holds_gradients else member.view.clone()
        member.hand_out(parameter.grad)
    return bucket


def parameters_of(*numels: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(numel)) for numel in numels]


# -- chunks ----------------------------------------------------------------------------


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_chunks_are_all_of_the_bucket_and_members_know_theirs(
    data: st.DataObject, numels: list[int], first: int
) -> None:
    numel = sum(numels)
    inner = data.draw(st.sets(st.integers(1, numel - 1)) if numel > 1 else st.just(set()))
    bucket = bucket_of(*parameters_of(*numels), ends=[*sorted(inner), numel], first=first)
    assert [chunk.index for chunk in bucket.chunks] == [first + i for i in range(len(inner) + 1)]
    assert torch.equal(torch.cat([chunk.sent for chunk in bucket.chunks]), bucket.buffer)
    for member in bucket.members:
        mine = set(range(member.view.data_ptr(), member.view.data_ptr() + member.view.nbytes, 4))
        for chunk in bucket.chunks:
            sent = chunk.sent
            theirs = set(range(sent.data_ptr(), sent.data_ptr() + sent.nbytes, 4))
            assert (chunk in member.chunks) == bool(mine & theirs)


def test_a_chunk_is_named_by_its_parameters() -> None:
    several = bucket_of(*parameters_of(2, 2), ends=[1, 4], first=3).chunks
    assert [chunk.name for chunk in several] == ["a..b 1/2", "a..b 2/2"]
    assert bucket_of(*parameters_of(2), names=()).chunks[0].name == "a parameter"


def test_it_knows_its_memory() -> None:
    bucket = bucket_of(*parameters_of(4))
    assert bucket.is_of(bucket.buffer.detach())
    assert not bucket.is_of(bucket.buffer[:2])
    assert not bucket.is_of(bucket.buffer.clone())


def test_a_gradient_in_it_is_laid_out_as_its_parameter() -> None:
    """The reducer copies in the order of memory, whatever the strides."""
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    [member] = bucket_of(parameter).members
    assert member.view.shape == parameter.shape
    assert member.view.stride() == parameter.stride()


# -- gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("holds_gradients", [False, True])
def test_a_read_waits_for_the_sum_and_all_of_the_bucket_has_come(holds_gradients: bool) -> None:
    one, two = parameters_of(2, 3)
    bucket = bucket_of(one, two, holds_gradients=holds_gradients)
    kept: Any = (one.grad, two.grad)
    assert [type(grad) for grad in kept] == [PendingGrad] * 2
    assert one.grad.tolist() == [2.0] * 2  # type: ignore[union-attr]
    assert not bucket.is_under_way
    assert kept[1].tolist() == [4.0] * 3
    assert [type(grad) for grad in (*kept, one.grad, two.grad)] == [Tensor] * 4
    assert bucket.sums.settled == ["a"]  # type: ignore[attr-defined]


def test_gradients_that_nobody_has_are_left_alone() -> None:
    one, two = parameters_of(2, 3)
    bucket = bucket_of(one, two)
    one.grad = None
    two.grad = other = torch.full((3,), 7.0)
    bucket.hand_back()
    assert one.grad is None
    assert other.tolist() == [7.0] * 3


def test_a_kept_gradient_has_the_sum_of_its_own_round() -> None:
    [parameter] = parameters_of(2)
    bucket = bucket_of(parameter)
    first = parameter.grad
    bucket.hand_back()
    bucket.buffer.fill_(9.0)
    bucket.is_under_way = True
    parameter.grad = torch.zeros(2)
    bucket.members[0].hand_out(parameter.grad)
    bucket.hand_back()
    assert first is not None
    assert (first.tolist(), parameter.grad.tolist()) == ([1.0] * 2, [9.0] * 2)


ZERO: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda grad: grad.zero_(),
    "foreach": lambda grad: torch._foreach_zero_([grad]),
}


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize(
    ("holds_gradients", "is_taken", "waits"),
    [(False, False, True), (False, True, False), (True, False, True), (True, True, True)],
)
def test_zeroing_waits_unless_an_update_reads_the_sum_elsewhere(
    holds_gradients: bool, is_taken: bool, waits: bool, zero: str
) -> None:
    [parameter] = parameters_of(2)
    bucket = bucket_of(parameter, holds_gradients=holds_gradients)
    [member] = bucket.members
    member.taken = is_taken
    grad: Any = parameter.grad
    ZERO[zero](grad)
    assert bool(bucket.sums.settled) is waits  # type: ignore[attr-defined]
    assert type(grad) is Tensor
    if not waits:
        assert member.view.tolist() == [1.0] * 2
        bucket.hand_back()
    assert grad.tolist() == [0.0] * 2


def test_a_new_round_takes_nothing_yet() -> None:
    [parameter] = parameters_of(2)
    [member] = bucket_of(parameter).members
    member.taken = True
    member.bucket.hand_back()
    parameter.grad = torch.zeros(2)
    member.hand_out(parameter.grad)
    assert not member.taken


def test_a_gradient_of_another_class_gets_the_sum_and_keeps_its_class() -> None:
    class Own(torch.Tensor):
        pass

    [parameter] = parameters_of(2)
    bucket = bucket_of(parameter)
    own: Any = torch.zeros(2).as_subclass(Own)
    bucket.members[0].hand_out(own)
    assert type(own) is Own
    bucket.hand_back()
    assert own.tolist() == [1.0] * 2
    assert type(own) is Own
