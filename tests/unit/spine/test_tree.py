"""The tree that the leader's word goes down."""

from __future__ import annotations

import pytest

from bytesched.tree import FAN_OUT, children, parent


def hops(size: int) -> list[list[int]]:
    """The ranks that hear the word at the same time, rank 0 first."""
    found = [[0]]
    while latest := [child for rank in found[-1] for child in children(rank, size)]:
        found.append(latest)
    return found


@pytest.mark.parametrize("size", [1, 2, 4, 9, 10, 64, 73, 74, 1024])
def test_the_word_reaches_every_rank_once(size: int) -> None:
    heard = [rank for hop in hops(size) for rank in hop]
    assert sorted(heard) == list(range(size))
    for rank in range(size):
        assert len(children(rank, size)) <= FAN_OUT
        assert all(parent(child) == rank for child in children(rank, size))


def test_few_ranks_hear_from_rank_0_itself() -> None:
    counts = [len(hops(size)) - 1 for size in (2, 9, 10, 64, 73, 74, 1024)]
    assert counts == [1, 1, 2, 2, 2, 3, 4]
    with pytest.raises(ValueError, match="rank 0 hears from nobody"):
        parent(0)
