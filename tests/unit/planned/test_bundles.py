"""Which parameters are updated together, and what stands for one in an update."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bytesched.plugins.planned.buckets import ALONE
from bytesched.plugins.planned.bundles import BundleState, Debt, Slot, bundled
from bytesched.plugins.planned.updates import calls


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
def test_bundles_have_every_parameter_once_in_the_order_of_use_and_whole_units(
    data: st.DataObject, sizes: list[int]
) -> None:
    slots = slots_of(*sizes)
    order = data.draw(st.permutations(range(len(sizes))))
    units = units_of(data, order)
    bundles = bundled(slots, units)
    assert len(bundles) <= len(units)
    assert all(len({slots[index].bundle.number for index in unit}) == 1 for unit in units)
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
    assert slots[0].known_uses == slots[20].known_uses == ALONE + 1
    assert [slot.name for slot in bundles[0].slots] == ["0", "tied"]
    assert len(bundles) > 5


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


def member_of(slot: Slot, value: float) -> Any:
    """Of a bucket."""
    return SimpleNamespace(view=torch.full_like(slot.parameter, value), chunks=[])


def test_an_update_reads_the_gradient_that_was_taken_last() -> None:
    [slot] = slots_of(3)
    for value in (1.0, 2.0):
        member = member_of(slot, value)
        slot.take(member)
        assert slot.alias.grad is member.view
    assert slot.known_uses == ALONE + 1
    slot.forget()
    assert slot.known_uses == ALONE


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


def test_several_bundles_are_updated_in_the_order_of_the_optimizer() -> None:
    """Its groups one after the other, with what each bundle has of them."""
    first, second, third = slots_of(4, 4, 4)
    by, groups = Mock(), ({"lr": 1.0}, {"lr": 2.0})
    debts = [Debt(by, group, [slot]) for group, slot in zip(groups, (third, first), strict=True)]
    debts.append(Debt(by, groups[1], [second]))
    assert calls([debts[2], debts[1], debts[0]]) == [
        (by, [(groups[0], [third]), (groups[1], [first, second])])
    ]
