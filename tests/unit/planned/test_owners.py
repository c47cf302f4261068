"""Whole tensors are dealt to ranks evenly, in runs of neighbours."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.bench.profile import load_profile
from bytesched.plugins.planned.owners import (
    bounds_of,
    has_parts,
    late_ones,
    owners_or_cuts,
    whole_owners_of,
)

SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=60)


def test_on_two_ranks_what_is_computed_last_and_needed_first_comes_too_late_to_one() -> None:
    assert late_ones([100, *[10] * 12], 2, 10) == {0}
    # In the middle of the others, its way to the owner and its way back are hidden.
    assert late_ones([*[10] * 12, 100, *[10] * 12], 2, 10) <= {0, 1}


@given(SIZES, st.integers(2, 8), st.integers(1, 20_000))
def test_only_what_is_as_large_as_a_chunk_comes_too_late(
    sizes: list[int], ranks: int, run: int
) -> None:
    assert all(sizes[index] >= run for index in late_ones(sizes, ranks, run))


@pytest.mark.parametrize("place", [0, 6])
def test_what_one_of_four_ranks_would_receive_too_late(place: int) -> None:
    sizes = [10] * 12
    sizes[place] = 100
    assert max(late_ones(sizes, 4, 10)) == place


@given(SIZES, st.integers(2, 8), st.integers(1, 20_000), st.integers(1, 3))
def test_whole_tensors_of_each_kind_are_even(
    sizes: list[int], ranks: int, run: int, kinds: int
) -> None:
    kind_of = [index % kinds for index in range(len(sizes))]
    owners = whole_owners_of(sizes, kind_of, ranks, run)
    for kind in range(kinds):
        loads = [0] * ranks
        largest = 0
        for n, k, owner in zip(sizes, kind_of, owners, strict=True):
            if k == kind:
                loads[owner] += n
                largest = max(largest, n)
        assert max(loads) - min(loads) <= 2 * run + largest


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["gpt", "resnet", "vgg"])
def test_state_of_a_model_is_within_5_percent(name: str, ranks: int) -> None:
    elements = [prod(shape) for layer in load_profile(name).layers for shape in layer.shapes]
    sizes = [4 * n for n in elements]
    owners = owners_or_cuts(sizes, [0] * len(sizes), [True] * len(sizes), ranks, 1 << 20, set())
    held = [0] * ranks
    for n, owner in zip(elements, owners, strict=True):
        if owner is not None:
            held[owner] += 4 * n
        else:
            for rank, (a, b) in enumerate(pairwise([0, *bounds_of(n, ranks)])):
                held[rank] += 4 * (b - a)
    assert sum(held) == sum(sizes)
    assert max(held) <= 1.05 * sum(sizes) / ranks


@given(SIZES, st.integers(2, 8), st.integers(1, 20_000), st.integers(1, 3))
def test_what_may_not_be_cut_has_one_owner(
    sizes: list[int], ranks: int, run: int, kinds: int
) -> None:
    kind_of = [index % kinds for index in range(len(sizes))]
    may_cut = [n % 2 == 0 for n in sizes]
    owners = owners_or_cuts(sizes, kind_of, may_cut, ranks, run, set())
    assert all(may for may, owner in zip(may_cut, owners, strict=True) if owner is None)


@given(st.integers(64 * 8, 10_000), st.integers(1, 8))
def test_parts_are_even_and_aligned(elements: int, ranks: int) -> None:
    bounds = [0, *bounds_of(elements, ranks)]
    assert bounds[-1] == elements
    assert all(bound % 64 == 0 for bound in bounds[:-1])
    parts = [b - a for a, b in pairwise(bounds)]
    assert has_parts(elements, ranks)
    assert min(parts) > 0
    assert max(parts) - min(parts) <= 64 + 64


def test_what_is_to_be_cut_is_cut() -> None:
    owners = owners_or_cuts([20, *[10] * 59], [0] * 60, [True] * 60, 2, 10, {0, 7})
    assert [index for index, owner in enumerate(owners) if owner is None] == [0, 7]
