"""What a rank updates of each parameter: together, all ranks update each element once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laid_out import parameters, plan_of
from torch import nn

from bytesched.errors import PluginError
from bytesched.plugins.layout.plan import Ownership, Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.zero1.shards import OwnedShards, Part, cut_entry, whole_entry

RANKS = 3


def plan_for(owners: list[int | None], wanted: list[nn.Parameter]) -> Plan:
    """Each parameter with its owner, or with a third of it for each rank."""
    plan = plan_of(wanted)
    bounds = {
        position: (slot.view.numel() // 3, 2 * slot.view.numel() // 3, slot.view.numel())
        for position, slot in enumerate(plan.slots)
        if owners[position] is None
    }
    plan.cut(64, Ownership(RANKS, owners=list(owners), bounds=bounds))
    return plan


@given(st.lists(st.none() | st.integers(0, RANKS - 1), min_size=1, max_size=5))
def test_each_element_is_updated_by_one_rank(owners: list[int | None]) -> None:
    plan = plan_for(owners, parameters(*((12 + n,) for n in range(len(owners)))))
    ranks = [OwnedShards(plan, rank) for rank in range(RANKS)]
    for position, slot in enumerate(plan.slots):
        counts = torch.zeros(slot.view.shape)
        for rank, shards in enumerate(ranks):
            own, part = shards.own.get(slot), shards.parts.get(slot)
            if own is slot:
                counts += 1
                assert part is None
                assert owners[position] == rank
                assert not shards.foreign[slot]
            elif own is not None:
                assert own is part
                assert part is not None
                counts[part.share.start_at : part.share.stop_at] += 1
            assert {share.rank for share in shards.foreign[slot]} == {
                share.rank for share in plan.shares(slot)
            } - {rank}
        assert counts.tolist() == [1.0] * slot.view.numel()
    for chunk in plan.chunks:
        holders = [
            [rank for rank, shards in enumerate(ranks) if chunk in shards.chunks[slot]]
            for slot in plan.slots_of[chunk.index]
        ]
        assert holders == [[plan.owners[chunk.index]]] * len(holders)
    for slot in plan.slots:
        for shards in ranks:
            assert {*shards.chunks[slot], *shards.foreign_chunks[slot]} == set(slot.chunks)


def part_of(parameter: nn.Parameter, rank: int = 1) -> tuple[Slot, Part]:
    plan = plan_for([None], [parameter])
    part = OwnedShards(plan, rank).parts.get(plan.slots[0])
    assert part is not None
    return plan.slots[0], part


def test_an_update_of_a_part_is_one_of_the_parameter() -> None:
    (parameter,) = parameters((3, 4))
    _, part = part_of(parameter)
    part.view.fill_(1.0)
    torch.optim.SGD([part.alias], lr=1.0).step()
    expected = torch.arange(12.0)
    expected[4:8] -= 1
    assert parameter.flatten().tolist() == expected.tolist()


def test_its_gradient_may_be_the_scripts_own_for_a_time() -> None:
    (parameter,) = parameters((3, 4))
    _, part = part_of(parameter)
    parameter.grad = torch.arange(12.0).reshape(3, 4)
    part.grad_from_parameter()
    assert part.alias.grad is not None
    assert part.alias.grad.tolist() == [4.0, 5.0, 6.0, 7.0]
    part.grad_from_arena()
    assert part.alias.grad is part.view


def test_a_parameter_that_got_other_memory_is_followed() -> None:
    (parameter,) = parameters((3, 4))
    slot, part = part_of(parameter)
    parameter.data = torch.zeros(3, 4)
    slot.realias()
    part.realias()
    with torch.no_grad():
        part.alias.fill_(5.0)
    assert parameter.flatten().tolist() == [0.0] * 4 + [5.0] * 4 + [0.0] * 4
    assert part.alias.grad is part.view


def test_a_parameter_that_got_other_strides_is_refused_by_its_name() -> None:
    (parameter,) = parameters((3, 4))
    slot, part = part_of(parameter)
    parameter.data = torch.zeros(4, 3).t()
    slot.realias()
    with pytest.raises(PluginError, match="'p0' was given strides"):
        part.realias()


@pytest.mark.parametrize("is_transposed", [False, True])
@given(cuts=st.lists(st.integers(1, 23), unique=True, min_size=1, max_size=4))
def test_parts_of_a_state_make_the_whole(is_transposed: bool, cuts: list[int]) -> None:
    (parameter,) = parameters((4, 6))
    if is_transposed:
        parameter.data = parameter.data.t().contiguous().t()
    plan = plan_of([parameter])
    bounds = (*sorted(cuts), 24)
    plan.cut(64, Ownership(len(bounds), owners=[None], bounds={0: bounds}))
    (slot,) = plan.slots
    shares = plan.shares(slot)
    assert [(share.start_at, share.stop_at) for share in shares] == list(pairwise([0, *bounds]))
    entry: dict[str, Any] = {
        "step": torch.tensor(3.0),
        "average": torch.randn(4, 6),
        "name": "adam",
    }
    parts = [cut_entry(entry, slot, share) for share in shares]
    assert all(part["step"] is entry["step"] and part["name"] == "adam" for part in parts)
    before = entry["average"].clone()
    whole = whole_entry(slot, shares, parts)
    assert torch.equal(whole["average"], before)
    assert float(whole["step"]) == 3.0
    # What a part is made of is its own.
    parts[0]["average"].zero_()
    assert torch.equal(entry["average"], before)
