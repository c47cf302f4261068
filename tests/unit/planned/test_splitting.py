"""When gradients come to go in two halves, and which go whole or by way of which owner."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_wire import FakeWire
from hypothesis import given
from hypothesis import strategies as st

from bytesched.plugins.planned.cutting import Way
from bytesched.plugins.planned.splitting import Gradient, Splitting, dealt

MB = 1_000_000
SECONDS_PER_BYTE = 1e-8
#: so much is nothing late
ANY = 1 << 40


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


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=30), st.floats(0, 0.1))
def test_every_gradient_has_a_way_the_same_each_time(sizes: list[float], apart_s: float) -> None:
    gradients = gradients_of(*sizes, apart_s=apart_s)
    ways = dealt(gradients, SECONDS_PER_BYTE, ANY)
    assert ways == dealt(gradients, SECONDS_PER_BYTE, ANY)
    for gradient in gradients:
        assert 0 <= ways[gradient.key].whole_bytes <= gradient.nbytes
        assert ways[gradient.key].owner in (0, 1)


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=30))
def test_what_is_still_to_come_is_even_at_any_time(sizes: list[float]) -> None:
    gradients = gradients_of(*sizes)
    ways = dealt(gradients, 0.0, ANY)
    for count in range(1, 1 + len(gradients)):
        here = gradients[:count]
        one, other = loads_of(here, ways)
        assert abs(one - other) <= max(gradient.nbytes for gradient in here)


def test_neighbours_of_one_owner_lie_together() -> None:
    ways = dealt([Gradient(key, MB) for key in range(8)], 0.0, ANY)
    assert [ways[key].owner for key in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("sizes", "late"),
    [
        ((1,) * 8 + (4,), [8]),
        # Hidden behind the others, or smaller than a chunk.
        ((1,) * 4 + (4,) + (1,) * 4, []),
        ((1,) * 9, []),
        ((1,) * 8 + (4, 0.1), [8]),
    ],
)
def test_what_is_computed_last_goes_whole(sizes: tuple[float, ...], late: list[int]) -> None:
    ways = dealt(gradients_of(*sizes), 0.0, 2 * MB)
    assert [key for key, way in ways.items() if way.whole_bytes] == late


def test_what_the_link_has_time_for_goes_whole() -> None:
    # Each takes 10 ms whole and 5 in halves, and one is ready every 9 ms: all but the last wait.
    gradients = gradients_of(*[1] * 20, apart_s=0.009)
    ways = dealt(gradients, SECONDS_PER_BYTE, ANY)
    whole = [ways[key].whole_bytes for key in range(20)]
    assert whole[0] == MB
    assert whole[-1] < MB
    assert sum(whole) > 10 * MB


def test_no_time_is_spent_where_there_is_none() -> None:
    ways = dealt(gradients_of(*[1] * 20), SECONDS_PER_BYTE, ANY)
    assert sum(way.whole_bytes for way in ways.values()) <= 1 * MB


def test_a_tensor_larger_than_a_share_goes_whole_as_far_as_the_other_link_is_idle() -> None:
    gradients = gradients_of(20, 1, 1, 1, 1)
    ways = dealt(gradients, SECONDS_PER_BYTE, ANY)
    assert ways[0].whole_bytes >= 10 * MB
    # Its owner's link takes it in any case.
    assert loads_of(gradients, ways)[1 - ways[0].owner] >= 3 * MB


# -- votes of two ranks, in rounds 4, 8, 16 and so on ------------------------------------

#: of 100 bytes; a script asks about gradients in the first of them, or both
SMALL, LARGE = (Mock(buffer=Mock(nbytes=n)) for n in (40, 60))
BOTH = (SMALL, LARGE)


def first_split(mode: str, asks: Callable[[int, int], tuple[Any, int] | None]) -> list[int]:
    """The rounds, of 40, that are the first ones in two halves: at most one, the same for both.

    Args:
        asks: of a rank in a round: about which buckets, and how many bytes are late then.
    """
    wires, found = list[FakeWire](), list[int]()
    ranks: list[Any] = [Splitting(FakeWire(ranks=wires), mode) for _ in range(2)]
    for number in range(1, 41):
        for rank in ranks:
            rank.landed()
        begun = {rank.round_begins(BOTH) for rank in ranks}
        assert len(begun) == 1
        found += [number] * begun.pop()
        for place, rank in enumerate(ranks):
            rank.round_ends()
            if (asked := asks(place, number)) is not None:
                buckets, late_bytes = asked
                members = [SimpleNamespace(bucket=bucket) for bucket in buckets]
                rank.ask(members, lambda late_bytes=late_bytes: late_bytes)
    return found


@pytest.mark.parametrize(
    ("mode", "asks", "expected"),
    [
        pytest.param("on", lambda *_: None, [1], id="on"),
        pytest.param("off", lambda *_: (BOTH, 50), [], id="off"),
        pytest.param("auto", lambda *_: (BOTH, 50), [5], id="all ask"),
        pytest.param("auto", lambda rank, _: None if rank else (BOTH, 50), [], id="one asks"),
        pytest.param("auto", lambda *_: ((SMALL,), 50), [], id="about a few"),
        pytest.param(
            *("auto", lambda rank, round_: (BOTH, 50) if round_ == (1, 6)[rank] else None, []),
            id="between other votes",
        ),
        # As soon as it is known for eight rounds, it counts how much is late.
        pytest.param(
            *("auto", lambda _, round_: (BOTH, 10) if round_ > 7 else None, []), id="little late"
        ),
        pytest.param(
            *("auto", lambda _, round_: (BOTH, 16 * (round_ > 15)) if round_ > 7 else None, [33]),
            id="late since the last vote",
        ),
    ],
)
def test_ranks_split_where_all_of_them_ask_and_much_is_late(
    mode: str, asks: Any, expected: list[int]
) -> None:
    assert first_split(mode, asks) == expected
