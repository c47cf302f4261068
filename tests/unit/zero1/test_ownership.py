"""Who updates which elements: all of them once, evenly, the same on every rank; and in boxes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bytesched.bench.profile import load_profile
from bytesched.errors import PluginError
from bytesched.plugins.planned.bundles import Slot
from bytesched.plugins.zero1.ownership import Ownership, Part, cut, owners_of

SHAPES = [(7,), (256, 128), (3, 5), (300, 301), (64,), (1, 1)]


def dealt(
    ranks: int,
    rank: int = 0,
    *,
    can_cut: bool = True,
    shapes: Any = SHAPES,
    run_bytes: int = 1 << 10,
) -> tuple[list[Slot], Ownership]:
    slots = [Slot(f"p{i}", nn.Parameter(torch.empty(shape))) for i, shape in enumerate(shapes)]
    ownership = Ownership(ranks, rank, run_bytes)
    ownership.deal([slot.parameter for slot in slots], can_cut=can_cut)
    return slots, ownership


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
    slots, ownership = dealt(ranks, can_cut=False)
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
        slot.parameter.zero_()
        part.alias.fill_(1.0)
    assert slot.parameter.sum() == piece.numel
    slot.parameter.data = slot.parameter.data.t().contiguous().t()
    with pytest.raises(PluginError, match="set memory formats before the first backward pass"):
        part.take(gradient)


SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=60)


@given(SIZES, st.integers(2, 8), st.integers(1, 20_000))
def test_whole_tensors_are_dealt_evenly(sizes: list[int], ranks: int, run_bytes: int) -> None:
    loads = [0] * ranks
    owners = owners_of(sizes, [False] * len(sizes), ranks, run_bytes)
    for n, owner in zip(sizes, owners, strict=True):
        assert owner is not None
        loads[owner] += n
    assert max(loads) - min(loads) <= 2 * run_bytes + max(sizes)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["gpt", "resnet", "vgg"])
def test_state_of_a_model_is_within_5_percent(name: str, ranks: int) -> None:
    shapes = [shape for layer in load_profile(name).layers for shape in layer.shapes]
    slots, ownership = dealt(ranks, shapes=shapes, run_bytes=1 << 20)
    held = [0] * ranks
    for slot in slots:
        for piece in ownership.of(slot.parameter):
            held[piece.rank] += piece.numel
    assert sum(held) == sum(slot.parameter.numel() for slot in slots)
    assert max(held) <= 1.05 * sum(held) / ranks


@given(SIZES, st.integers(2, 8), st.integers(1, 20_000))
def test_what_may_not_be_cut_has_one_owner(sizes: list[int], ranks: int, run_bytes: int) -> None:
    may_cut = [n % 2 == 0 for n in sizes]
    owners = owners_of(sizes, may_cut, ranks, run_bytes)
    assert all(may for may, owner in zip(may_cut, owners, strict=True) if owner is None)


@given(st.integers(64 * 8, 10_000), st.integers(1, 8))
def test_parts_are_even_and_aligned(elements: int, ranks: int) -> None:
    pieces = cut(elements, ranks)
    assert [piece.rank for piece in pieces] == list(range(ranks))
    assert pieces[-1].stop == elements
    assert all(piece.start % 64 == 0 for piece in pieces)
    sizes = [piece.numel for piece in pieces]
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 64 + 64
