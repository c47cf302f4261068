"""When gradients come to go in two halves: the votes of two ranks, in rounds 4, 8, 16 and so on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_wire import FakeWire

from bytesched.plugins.planned.splitting import Splitting

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
