"""Packing: gradients into what is sent, divided and rounded as DDP does it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laid_out import parameters, plan_of
from torch import Tensor, nn

from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Plan


def gradients(plan: Plan) -> list[Tensor]:
    """One for each slot, given to it as its hook does."""
    made = []
    for slot in plan.slots:
        made.append(torch.randn_like(slot.parameter.detach()))
        slot.give(made[-1])
    return made


def sent_alone(plan: Plan, packer: Packer) -> None:
    """All chunks there and back, on one rank."""
    for chunk in plan.chunks:
        assert packer.pack(chunk) is packer.memory(chunk)
        packer.receive(chunk)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    partition_bytes=st.integers(1, 200),
    divisor=st.integers(1, 5),
)
def test_gradients_arrive_divided(sizes: list[int], partition_bytes: int, divisor: int) -> None:
    plan = plan_of(parameters(*((n,) for n in sizes)), partition_bytes)
    packer = Packer(plan, divisor, "none")
    wanted = gradients(plan)
    sent_alone(plan, packer)
    for slot, gradient in zip(plan.slots, wanted, strict=True):
        # As DDP does: times the inverse, not divided.
        assert torch.equal(slot.view, gradient * (1.0 / divisor))


@pytest.mark.parametrize(("compression", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.half)])
@pytest.mark.parametrize("divisor", [1, 3])
def test_on_the_wire_it_is_rounded_before_it_is_divided(
    compression: str, dtype: torch.dtype, divisor: int
) -> None:
    plan = plan_of(parameters((40,), (7,)), partition_bytes=60)
    packer = Packer(plan, divisor, compression)
    wanted = gradients(plan)
    assert {packer.memory(chunk).dtype for chunk in plan.chunks} == {dtype}
    sent_alone(plan, packer)
    for slot, gradient in zip(plan.slots, wanted, strict=True):
        rounded = gradient.to(dtype)
        assert torch.equal(slot.view, (rounded / divisor if divisor > 1 else rounded).float())


def test_flags_are_not_compressed() -> None:
    plan = plan_of(parameters((4,)), find_unused=True)
    packer = Packer(plan, 2, "bf16")
    assert plan.flags_chunk is not None
    assert packer.memory(plan.flags_chunk) is plan.used_flags


def test_a_parameter_without_a_gradient_sends_zeros() -> None:
    plan = plan_of(parameters((9,), (9,)), partition_bytes=16)
    packer = Packer(plan, 2, "none")
    _, second = plan.slots
    gradients(plan)
    second.view.fill_(7.0)
    second.give(None)
    sent_alone(plan, packer)
    assert not second.view.any()


@pytest.mark.parametrize("partition_bytes", [20, 1 << 20])
@pytest.mark.parametrize("of_the_parameter", [True, False])
@pytest.mark.parametrize("of_the_gradient", [True, False])
def test_strides_may_differ(
    partition_bytes: int, of_the_parameter: bool, of_the_gradient: bool
) -> None:
    formats = {True: torch.channels_last, False: torch.contiguous_format}
    values = torch.randn(4, 3, 2, 2)
    kernel = nn.Parameter(values.to(memory_format=formats[of_the_parameter]))
    plan = plan_of([kernel], partition_bytes)
    packer = Packer(plan, 1, "none")
    wanted = values.cos().to(memory_format=formats[of_the_gradient])
    plan.slots[0].give(wanted)
    sent_alone(plan, packer)
    assert torch.equal(plan.slots[0].view, wanted)


def test_a_gradient_within_other_memory_is_packed_in_parts() -> None:
    plan = plan_of(parameters((10,)), partition_bytes=8)
    packer = Packer(plan, 1, "none")
    wanted = torch.arange(30.0)[11:21]
    plan.slots[0].give(wanted)
    assert len(plan.chunks) > 3
    sent_alone(plan, packer)
    assert torch.equal(plan.slots[0].view, wanted)


def test_a_gradient_lives_until_its_last_chunk_is_complete() -> None:
    plan = plan_of(parameters((10,)), partition_bytes=16)
    packer = Packer(plan, 1, "none")
    gradients(plan)
    *others, last = plan.chunks
    for chunk in others:
        packer.let_go(chunk)
        assert any(slice_.grad is not None for slice_ in plan.slots[0].slices)
    packer.let_go(last)
    assert all(slice_.grad is None for slice_ in plan.slots[0].slices)


def test_another_cut_has_other_memory_on_the_wire() -> None:
    plan = plan_of(parameters((40,)), partition_bytes=32)
    packer = Packer(plan, 1, "fp16")
    plan.cut(80)
    packer.plan_cut()
    assert [packer.memory(chunk).numel() for chunk in plan.chunks] == [
        buffer.numel() for buffer in plan.buffers
    ]
    wanted = gradients(plan)
    sent_alone(plan, packer)
    assert torch.equal(plan.slots[0].view, wanted[0].half().float())
