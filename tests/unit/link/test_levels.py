"""Which ranks share a host, and what leaves it."""

from __future__ import annotations

import pytest

from bytesched.link.levels import levels_of, ring_share, shares_hosts, two_level_share


def test_ranks_within_a_host_and_those_of_one_place() -> None:
    levels = levels_of(["a", "b", "a", "b"])
    assert levels is not None
    assert levels.within(2) == (0, 2)
    assert levels.between(2) == (2, 3)
    assert levels.ranks_per_host == 2


@pytest.mark.parametrize("names", ["a", "aa", "ab", "aab", "aabbb"])
def test_hosts_without_two_levels(names: str) -> None:
    assert levels_of(names) is None


@pytest.mark.parametrize(
    ("names", "shared"), [("aa", False), ("ab", False), ("aab", True), ("aabb", True)]
)
def test_hosts_that_are_shared(names: str, shared: bool) -> None:
    assert shares_hosts(names) is shared


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_what_a_ring_sends_more(hosts: int) -> None:
    ranks = 8 * hosts
    names = [str(rank // 8) for rank in range(ranks)]
    more = ring_share(names) / two_level_share(hosts)
    assert more == pytest.approx((ranks - 1) / (8 * (hosts - 1)))


def test_a_ring_that_changes_hosts_at_every_rank() -> None:
    assert ring_share("abab") == pytest.approx(2 * 1.5)
    assert ring_share("aaaa") == 0
