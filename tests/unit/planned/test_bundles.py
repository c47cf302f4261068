"""Which parameters are updated together, and what stands for one in an update."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bytesched.plugins.planned.buckets import ALONE, Bucket
from bytesched.plugins.planned.bundles import BundleState, Debt, Slot, bundled
from bytesched.plugins.planned.cutting import Cut


def slots_of(*sizes: int) -> list[Slot]:
    return [Slot(f"{i}", nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]


def each(count: int) -> list[list[int]]:
    return [[index] for index in range(count)]


def units_of(data: st.DataObject, order: list[int]) -> list[list[int]]:
    """The same, cut somewhere."""
    cuts = data.draw(st.sets(st.integers(1, len(order))))
    ends = [0, *sorted(cuts | {len(order)})]
    return [order[a:b] for a, b in pairwise(ends)]


@given(st.data(), st.lists(st.integers(0, 300), min_size=1, max_size=40))
def test_bundles_have_every_parameter_once_in_the_order_of_use(
    data: st.DataObject, sizes: list[int]
) -> None:
    slots = slots_of(*sizes)
    order = data.draw(st.permutations(range(len(sizes))))
    bundles = bundled(slots, units_of(data, order))
    assert [slot for bundle in bundles for slot in bundle.slots] == [slots[i] for i in order]
    assert [bundle.number for bundle in bundles] == list(range(len(bundles)))
    assert all(slot.bundle is bundle for bundle in bundles for slot in bundle.slots)
    assert all(bundle.slots and bundle.state is BundleState.FREE for bundle in bundles)


def test_there_are_not_many_and_the_first_is_small() -> None:
    bundles = bundled(slots_of(*[10] * 100), each(100))
    sizes = [sum(slot.parameter.numel() for slot in bundle.slots) for bundle in bundles]
    assert 10 <= len(sizes) <= 30
    assert sizes[0] <= max(sizes) / 2
    assert max(sizes[1:]) <= 2 * min(sizes[1:-1])


def test_parameters_over_one_memory_are_updated_together() -> None:
    """The optimizer has an order in which it updates them."""
    slots = slots_of(*[10] * 20)
    memory = slots[0].parameter.detach()
    slots.append(Slot("tied", nn.Parameter(memory[2:])))
    slots.append(Slot("empty", nn.Parameter(torch.zeros(0))))
    slots.append(Slot("empty, too", nn.Parameter(torch.zeros(0))))
    bundles = bundled(slots, each(len(slots)))
    assert slots[20].bundle is slots[0].bundle
    assert [slot.name for slot in bundles[0].slots] == ["0", "tied"]
    assert len(bundles) > 5


@given(st.data(), st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_none_begins_within_a_unit(data: st.DataObject, sizes: list[int]) -> None:
    slots = slots_of(*sizes)
    units = units_of(data, list(range(len(sizes))))
    bundles = bundled(slots, units)
    assert all(len({slots[index].bundle.number for index in unit}) == 1 for unit in units)
    assert len(bundles) <= len(units)


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_has_come_is_updated_by_itself(is_tied: bool) -> None:
    """In the order of the steps; where parameters are over one memory, all of it or nothing."""
    bundle: Any
    [bundle] = bundled(slots_of(4, 4, 4), [[0, 1, 2]])
    first, second, third = bundle.slots
    bundle.is_tied = is_tied
    one, other = Debt(cast(Any, "one"), {}, [first, second]), Debt(cast(Any, "other"), {}, [third])
    again = Debt(cast(Any, "again"), {}, [second])
    bundle.debts = [one, other, again]
    for number, slot in enumerate(bundle.slots):
        slot.awaits = cast(Any, [number])
    taken, left = bundle.split(set())
    assert taken == []
    assert [debt.slots for debt in left] == [debt.slots for debt in bundle.debts]
    taken, left = bundle.split(cast(Any, {1, 2}))
    assert bundle.debts == [one, other, again]
    if is_tied:
        assert (taken, left) == ([], bundle.debts)
        return
    assert [debt.by for debt in taken] == [one.by, other.by, again.by]
    assert [debt.slots for debt in taken] == [[second], [third], [second]]
    assert [(debt.by, debt.slots) for debt in left] == [(one.by, [first])]
    assert bundle.split(cast(Any, {0, 1, 2})) == (bundle.debts, [])


class Sums:
    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return NotImplemented

    def settle(self, member: Any) -> None:
        raise AssertionError("nothing waits here")


def member_of(slot: Slot, value: float) -> Any:
    buffer = torch.full((slot.parameter.numel(),), value)
    view = buffer.view(slot.parameter.shape)
    bucket = Bucket(
        *(Sums(), buffer, [slot.parameter], [view], {}),
        holds_gradients=False,
        cut=lambda _, __, buffer: [Cut(buffer.numel())],
        first=0,
    )
    return bucket.members[0]


def test_an_update_sees_the_parameter_and_the_gradient_in_the_bucket() -> None:
    [slot] = slots_of(3)
    slot.parameter.grad = torch.full((3,), 5.0)
    member = member_of(slot, 2.0)
    assert slot.take(member)
    alias = slot.alias
    torch.optim.SGD([alias], lr=1.0).step()
    assert slot.parameter.tolist() == [-2.0] * 3
    assert slot.parameter.grad.tolist() == [5.0] * 3
    assert alias._version == slot.parameter._version
    assert not slot.take(member)
    assert slot.alias is alias


def test_it_sees_where_both_have_moved() -> None:
    [slot] = slots_of(3)
    slot.take(member_of(slot, 2.0))
    alias, other = slot.alias, member_of(slot, 3.0)
    assert not slot.take(other)
    assert slot.alias is alias
    assert alias.grad is other.view
    slot.parameter.data = torch.ones(3)
    assert slot.take(other)
    assert slot.alias is not alias
    assert slot.alias.data_ptr() == slot.parameter.data_ptr()
    assert slot.alias.grad is other.view


@pytest.mark.parametrize("is_trained", [False, True])
def test_an_alias_is_as_its_parameter(is_trained: bool) -> None:
    [slot] = slots_of(2)
    slot.parameter.requires_grad_(is_trained)
    slot.take(member_of(slot, 1.0))
    assert slot.alias.requires_grad is is_trained
    assert type(slot.alias) is nn.Parameter


def test_uses_of_memory_that_is_no_more_are_not_counted() -> None:
    """Whoever has the new memory is somebody else."""
    one, other = slots_of(4, 4)
    one.take(member_of(one, 1.0))
    assert one.known_uses == ALONE + 1
    one.parameter.data = other.parameter.data
    one.count_uses()
    assert one.known_uses == ALONE
    alias = one.alias
    one.forget()
    assert one.alias is one.parameter
    assert alias.grad is None
    assert alias.numel() == 0
    assert other.parameter.numel() == 4
