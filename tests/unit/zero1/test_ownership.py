"""Who updates which elements: all of them once, evenly, the same on every rank; and in boxes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from bytesched.errors import PluginError
from bytesched.plugins.planned.bundles import Slot
from bytesched.plugins.zero1.ownership import Ownership, Part

SHAPES = [(7,), (256, 128), (3, 5), (300, 301), (64,), (1, 1)]


def dealt(ranks: int, rank: int = 0, *, may_cut: bool = True) -> tuple[list[Slot], Ownership]:
    slots = [Slot(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(SHAPES)]
    kinds, cuts = [0] * len(slots), [may_cut] * len(slots)
    return slots, Ownership(slots, kinds, cuts, ranks=ranks, rank=rank, run_bytes=1 << 10)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_element_has_one_owner(ranks: int) -> None:
    slots, ownership = dealt(ranks)
    for slot in slots:
        pieces = ownership.of(slot.parameter)
        assert pieces[0].start == 0
        assert pieces[-1].stop == slot.parameter.numel()
        assert all(one.stop == other.start for one, other in pairwise(pieces))
        assert [piece.rank for piece in pieces] == sorted({piece.rank for piece in pieces})


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_large_tensors_are_cut_evenly_where_they_may_be(ranks: int) -> None:
    slots, ownership = dealt(ranks)
    is_cut = [ownership.is_cut(slot.parameter) for slot in slots]
    assert is_cut == [False, True, False, True, False, False]
    loads = [0] * ranks
    for slot in slots:
        for piece in ownership.of(slot.parameter):
            loads[piece.rank] += piece.numel
    assert max(loads) <= 1.05 * sum(loads) / ranks
    slots, ownership = dealt(ranks, may_cut=False)
    assert not any(ownership.is_cut(slot.parameter) for slot in slots)


def test_a_rank_knows_its_own() -> None:
    for rank in range(3):
        slots, ownership = dealt(3, rank)
        for slot in slots:
            own = ownership.own(slot.parameter)
            assert own == next((p for p in ownership.of(slot.parameter) if p.rank == rank), None)
            is_whole = own is not None and own.numel == slot.parameter.numel()
            assert ownership.is_whole_here(slot.parameter) == is_whole


def test_a_part_is_a_view_of_its_elements() -> None:
    slots, ownership = dealt(2, 1)
    slot = slots[1]
    piece = ownership.own(slot.parameter)
    assert piece is not None
    part = Part(slot, piece)
    gradient = torch.arange(slot.parameter.numel(), dtype=torch.float32).view(256, 128)
    assert part.take(gradient)
    assert not part.take(gradient)
    assert part.alias.grad is not None
    assert part.alias.grad.tolist() == gradient.view(-1)[piece.start : piece.stop].tolist()
    with torch.no_grad():
        part.alias.fill_(1.0)
    assert slot.parameter.sum() == piece.numel
    slot.parameter.data = slot.parameter.data.t().contiguous().t()
    with pytest.raises(PluginError, match="set memory formats before the first backward pass"):
        part.take(gradient)
