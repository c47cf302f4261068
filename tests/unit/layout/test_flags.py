"""Numbers of slots, summed over the ranks of each one's group in one sum over all."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bytesched.plugins.layout.flags import cell_count, from_cells, to_cells
from bytesched.plugins.layout.partition import Partition
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Slot

RANKS = 4
#: by number: the groups of all ranks
DIVISIONS: dict[int, list[tuple[int, ...]]] = {1: [(0, 2), (1, 3)], 2: [(0,), (1,), (2,), (3,)]}


def slot(name: str, number: int, rank: int, numel: int = 3) -> Slot:
    made = Slot(name, nn.Parameter(torch.zeros(numel)))
    if number:
        groups = DIVISIONS[number]
        place = next(n for n, members in enumerate(groups) if rank in members)
        made.partition = Partition(number, groups[place], place, len(groups))
    return made


@given(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6), st.data())
def test_each_group_has_its_own_sum(numbers: list[int], data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 5), min_size=len(numbers), max_size=len(numbers))
    values = [data.draw(row) for _ in range(RANKS)]
    slots = [[slot(str(n), n, rank) for n in numbers] for rank in range(RANKS)]
    cells = [to_cells(mine, theirs) for mine, theirs in zip(slots, values, strict=True)]
    assert {len(one) for one in cells} == {cell_count(slots[0])}
    summed = [sum(column) for column in zip(*cells, strict=True)]
    for rank in range(RANKS):
        expected = []
        for at, number in enumerate(numbers):
            whole = [tuple(range(RANKS))]
            members = next(m for m in DIVISIONS.get(number, whole) if rank in m)
            expected.append(sum(values[member][at] for member in members))
        assert from_cells(slots[rank], summed) == expected


def test_no_chunk_has_slots_of_two_groups() -> None:
    slots = [slot(f"p{at}", number, 2) for at, number in enumerate([0, 1, 0, 2, 1, 0])]
    plan = Plan(slots, partition_bytes=1 << 20, find_unused=True)
    assert [chunk.group for chunk in plan.chunks] == [0, 0, 1, 2]
    for chunk in plan.chunks[1:]:
        numbers = {s.partition.number if s.partition else 0 for s in plan.slots_of[chunk.index]}
        assert numbers == {chunk.group}
    assert plan.used_flags is not None
    assert len(plan.used_flags) == 3 + 2 * 2 + 4
    plan.cut(8)
    assert {chunk.group for chunk in plan.chunks} == {0, 1, 2}
