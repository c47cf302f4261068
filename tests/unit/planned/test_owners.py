"""Whose tensors are whose: even loads, in runs of neighbours, and who sums which gradient."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.bench.profile import load_profile
from bytesched.plugins.planned.owners import (
    Gradient,
    Way,
    bounds_of,
    dealt,
    has_parts,
    late_ones,
    owners_or_cuts,
    whole_owners_of,
)

SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=60)
MB = 1_000_000
SECONDS_PER_BYTE = 1e-8


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


def gradients_of(*sizes_mb: float, apart_s: float = 0.0) -> list[Gradient]:
    """Each in a bucket of its own, ready one after another."""
    return [
        Gradient(key, int(size * MB), bucket=key, ready_s=apart_s * key)
        for key, size in enumerate(sizes_mb)
    ]


def loads_of(gradients: list[Gradient], ways: dict[int, Way]) -> list[int]:
    """What each rank sums for both, in bytes."""
    loads = [0, 0]
    for gradient in gradients:
        loads[ways[gradient.key].owner] += gradient.nbytes - ways[gradient.key].whole_bytes
    return loads


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=30))
def test_what_is_still_to_come_is_even_at_any_time(sizes: list[float]) -> None:
    gradients = gradients_of(*sizes)
    ways = dealt(gradients, 0.0)
    for count in range(1, 1 + len(gradients)):
        here = gradients[:count]
        one, other = loads_of(here, ways)
        assert abs(one - other) <= max(gradient.nbytes for gradient in here)


def test_neighbours_of_one_owner_lie_together() -> None:
    gradients = [Gradient(key, MB) for key in range(8)]
    assert [dealt(gradients, 0.0)[key].owner for key in range(8)] == [0] * 4 + [1] * 4


def test_what_is_late_goes_whole() -> None:
    gradients = gradients_of(1, 1, 1, 4)
    ways = dealt(gradients, 0.0, late={3})
    assert [ways[key].whole_bytes for key in range(4)] == [0, 0, 0, 4 * MB]


def test_what_the_link_has_time_for_goes_whole() -> None:
    # Each takes 10 ms whole and 5 in halves, and one is ready every 9 ms: all but the last wait.
    gradients = gradients_of(*[1] * 20, apart_s=0.009)
    ways = dealt(gradients, SECONDS_PER_BYTE)
    whole = [ways[key].whole_bytes for key in range(20)]
    assert whole[0] == MB
    assert whole[-1] < MB
    assert sum(whole) > 10 * MB


def test_no_time_is_spent_where_there_is_none() -> None:
    ways = dealt(gradients_of(*[1] * 20), SECONDS_PER_BYTE)
    assert sum(way.whole_bytes for way in ways.values()) <= 1 * MB


def test_a_tensor_larger_than_a_share_goes_whole_as_far_as_the_other_link_is_idle() -> None:
    gradients = gradients_of(20, 1, 1, 1, 1)
    ways = dealt(gradients, SECONDS_PER_BYTE)
    assert ways[0].whole_bytes >= 10 * MB
    # Its owner's link takes it in any case.
    assert loads_of(gradients, ways)[1 - ways[0].owner] >= 3 * MB
