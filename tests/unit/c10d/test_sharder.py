"""How a plan is cut for owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bytesched.plugins.c10d.sharder import MessageSharder
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Slot

PARTITION_BYTES = 4096


def plan() -> Plan:
    sizes = [5000, 300, 300, 40_000, 20, 3000, 3000, 3000]
    slots = [Slot(f"p{n}", nn.Parameter(torch.zeros(size))) for n, size in enumerate(sizes)]
    return Plan(slots, partition_bytes=PARTITION_BYTES)


def sharder(ranks: int) -> MessageSharder:
    def unused(*_: Any) -> Any:
        raise AssertionError

    return MessageSharder(ranks, unused, unused)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_chunk_occupies_a_link_as_long_as_one_of_an_all_reduce(ranks: int) -> None:
    found = plan()
    sharder(ranks).cut(found, PARTITION_BYTES, [0] * 8, [True] * 8)
    most_bytes = max(chunk.nbytes for chunk in found.chunks)
    assert most_bytes <= 1.5 * 2 * PARTITION_BYTES / ranks


def test_tensors_with_several_owners_are_measured_by_turns() -> None:
    found = plan()
    sharder(3).cut(found, PARTITION_BYTES, [0] * 8, [True] * 8)
    cut = [slot for slot in found.slots if len(found.shares(slot)) > 1]
    assert [found.measurer(slot) for slot in cut] == [n % 3 for n in range(len(cut))]
    assert {found.measurer(slot) for slot in found.slots if slot not in cut} == {None}


@pytest.mark.parametrize("ranks", [3, 8])
def test_of_many_ranks_each_updates_a_part_of_what_is_large(ranks: int) -> None:
    found = plan()
    sharder(ranks).cut(found, PARTITION_BYTES, [0] * 8, [True] * 7 + [False])
    parts = [len(found.shares(slot)) for slot in found.slots]
    assert parts == [ranks, 1, 1, ranks, 1, ranks, ranks, 1]
