"""Whole tensors are dealt to ranks evenly, in runs of neighbours."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from bytesched.plugins.c10d.split.owners import owners_of

SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=60)


@given(SIZES, st.integers(2, 8), st.integers(1, 20_000))
def test_nobody_owns_what_is_more_than_a_share(sizes: list[int], ranks: int, run: int) -> None:
    owners = owners_of(sizes, ranks, run)
    share = sum(sizes) / ranks
    assert len(owners) == len(sizes)
    for nbytes, owner in zip(sizes, owners, strict=True):
        assert (owner is None) == (nbytes > share)
        assert owner is None or 0 <= owner < ranks


@given(SIZES, st.integers(2, 8), st.integers(1, 20_000))
def test_loads_differ_by_no_more_than_a_run(sizes: list[int], ranks: int, run: int) -> None:
    owners = owners_of(sizes, ranks, run)
    loads = [
        sum(n for n, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(ranks)
    ]
    owned = [n for n, owner in zip(sizes, owners, strict=True) if owner is not None]
    assert max(loads) - min(loads) <= run + max(owned, default=0)


def test_small_neighbours_go_together_and_ranks_take_turns_from_the_back() -> None:
    owners = owners_of([10] * 12, 2, 30)
    runs = [(owner, len(list(members))) for owner, members in groupby(owners)]
    assert runs == [(1, 3), (0, 3), (1, 3), (0, 3)]
