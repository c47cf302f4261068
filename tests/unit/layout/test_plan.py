"""The plan: every element of every gradient in one chunk, front to back, cut anew in place."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laid_out import parameters, plan_of
from torch import nn

from bytesched.plugins.layout.plan import Plan
from bytesched.round import BundleState, GradientState

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
PARTITION_BYTES = st.integers(1, 400)


def check(plan: Plan) -> None:
    """What holds however a plan is cut."""
    assert [chunk.index for chunk in plan.chunks] == list(range(len(plan.chunks)))
    assert [chunk.priority for chunk in plan.chunks] == list(range(len(plan.chunks)))
    covered: dict[str, list[tuple[int, int]]] = {slot.name: [] for slot in plan.slots}
    for chunk, buffer, slices in zip(plan.chunks, plan.buffers, plan.slices, strict=True):
        if chunk is plan.flags_chunk:
            assert slices == []
            continue
        # What the slices are is what is sent, in the same order.
        assert [slice_.target.data_ptr() for slice_ in slices] == list(
            itertools.accumulate(
                (slice_.target.nbytes for slice_ in slices[:-1]), initial=buffer.data_ptr()
            )
        )
        assert sum(slice_.target.nbytes for slice_ in slices) == buffer.nbytes == chunk.nbytes
        for slice_ in slices:
            assert chunk in slice_.slot.chunks
            assert slice_.is_whole == (slice_.target.numel() == slice_.slot.parameter.numel())
            covered[slice_.slot.name].append((slice_.start_at, slice_.stop_at))
    for slot in plan.slots:
        ends = [0, *itertools.chain.from_iterable(sorted(covered[slot.name]))]
        assert ends[0::2] == [*ends[1::2], slot.parameter.numel()][: len(ends[0::2])]
        assert sorted(covered[slot.name])[-1][1] == slot.parameter.numel()
    check_bundles(plan)


def check_bundles(plan: Plan) -> None:
    """Each parameter is updated once, as soon as its last chunk is there."""
    in_bundles = [slot for bundle in plan.bundles for slot in bundle.slots]
    assert sorted(slot.name for slot in in_bundles) == sorted(slot.name for slot in plan.slots)
    for number, bundle in enumerate(plan.bundles):
        assert bundle.index == number
        assert bundle.chunks == {chunk for slot in bundle.slots for chunk in slot.chunks}
        assert bundle.nbytes == sum(slot.view.nbytes for slot in bundle.slots)
        lasts = {max(chunk.index for chunk in slot.chunks) for slot in bundle.slots}
        assert len(lasts) == 1
        assert all(slot.bundle is bundle for slot in bundle.slots)
    for chunk, bundles in zip(plan.chunks, plan.bundles_of, strict=True):
        assert bundles == [bundle for bundle in plan.bundles if chunk in bundle.chunks]


@given(sizes=SIZES, partition_bytes=PARTITION_BYTES, find_unused=st.booleans())
def test_every_element_is_in_one_chunk(
    sizes: list[int], partition_bytes: int, find_unused: bool
) -> None:
    plan = plan_of(parameters(*((n,) for n in sizes)), partition_bytes, find_unused=find_unused)
    check(plan)
    assert plan.nbytes == 4 * sum(sizes) + 4 * len(sizes) * find_unused


@given(sizes=SIZES, first=PARTITION_BYTES, second=PARTITION_BYTES)
def test_cutting_again_leaves_gradients_where_they_are(
    sizes: list[int], first: int, second: int
) -> None:
    plan = plan_of(parameters(*((n,) for n in sizes)), first)
    lists = (plan.chunks, plan.slices, plan.buffers, plan.bundles, plan.bundles_of)
    places = [slot.view.data_ptr() for slot in plan.slots]
    for slot in plan.slots:
        slot.view.copy_(slot.parameter.detach())
    plan.cut(second)
    check(plan)
    assert [slot.view.data_ptr() for slot in plan.slots] == places
    assert all(torch.equal(slot.view, slot.parameter) for slot in plan.slots)
    now = (plan.chunks, plan.slices, plan.buffers, plan.bundles, plan.bundles_of)
    assert all(ours is theirs for ours, theirs in zip(lists, now, strict=True))
    fresh = plan_of([slot.parameter for slot in plan.slots], second)
    assert [chunk.nbytes for chunk in plan.chunks] == [chunk.nbytes for chunk in fresh.chunks]


def test_the_first_chunk_is_small() -> None:
    plan = plan_of(parameters((1000,)), partition_bytes=800)
    assert plan.chunks[0].nbytes == 800 // 8
    assert {chunk.nbytes for chunk in plan.chunks[4:-1]} == {800}


def test_dtypes_do_not_share_memory_and_priorities_are_of_the_forward_order() -> None:
    one, two = parameters((6,), (6,))
    between = parameters((6,), dtype=torch.float64)[0]
    plan = plan_of([one, between, two], partition_bytes=1 << 20)
    check(plan)
    assert [buffer.dtype for buffer in plan.buffers] == [torch.float32, torch.float64]
    # The first arena holds the first parameter, although it holds the last one, too.
    assert [slice_.slot.name for slices in plan.slices for slice_ in slices] == ["p0", "p2", "p1"]


def test_flags_of_used_parameters_go_first() -> None:
    plan = plan_of(parameters((30,), (30,)), find_unused=True)
    assert plan.flags_chunk is plan.chunks[0]
    assert plan.buffers[0] is plan.used_flags
    assert plan.used_flags.tolist() == [0, 0]
    plan.cut(16)
    check(plan)
    assert plan.flags_chunk is plan.chunks[0]
    assert plan.buffers[0] is plan.used_flags


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_views_have_the_strides_of_their_parameters(layout: torch.memory_format) -> None:
    kernel = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=layout))
    [slot] = plan_of([kernel]).slots
    assert slot.view.shape == kernel.shape
    assert slot.view.stride() == kernel.stride()
    # Or `p.grad.detach_()` would be refused.
    assert not slot.view._is_view()
    assert slot.alias.grad is slot.view
    assert slot.alias.data_ptr() == kernel.data_ptr()


def test_a_parameter_with_gaps_gets_a_view_without() -> None:
    gappy = nn.Parameter(torch.zeros(4, 8)[:, ::2])
    [slot] = plan_of([gappy]).slots
    assert slot.view.shape == gappy.shape
    assert slot.view.is_contiguous()


def test_an_alias_follows_its_parameter_to_other_memory() -> None:
    [parameter] = parameters((5,))
    [slot] = plan_of([parameter]).slots
    parameter.data = torch.ones(5)
    assert slot.alias.data_ptr() != parameter.data_ptr()
    slot.realias()
    assert slot.alias.data_ptr() == parameter.data_ptr()
    assert slot.alias.grad is slot.view


def test_a_gradient_is_taken_while_its_update_is_outstanding() -> None:
    slot = plan_of(parameters((5,))).slots[0]
    slot.make_lazy(lambda: None)
    assert not slot.lazy.is_taken()
    slot.state = GradientState.ARMED
    assert not slot.is_taken()
    slot.bundle.state = BundleState.ARMED
    assert slot.lazy.is_taken()
