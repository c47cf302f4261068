"""A link that transfers share."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.link.shared import Event, Process, SharedLink


def ends_of(transfers: list[tuple[float, float]]) -> list[float]:
    """When each transfer ends, of pairs: when it begins, and how long it takes alone."""
    link = SharedLink()
    ends_s = [-1.0] * len(transfers)

    def transfer(index: int, at_s: float, alone_s: float) -> Process:
        yield at_s
        yield link.carry(alone_s)
        ends_s[index] = link.now_s

    for index, times in enumerate(transfers):
        link.go_on(transfer(index, *times))
    link.run()
    return ends_s


def test_two_take_twice_as_long_until_one_is_over() -> None:
    assert ends_of([(0.0, 1.0), (0.0, 3.0)]) == pytest.approx([2.0, 4.0])
    assert ends_of([(0.0, 3.0), (1.0, 1.0)]) == pytest.approx([4.0, 3.0])
    assert ends_of([(0.0, 1.0), (5.0, 0.0)]) == pytest.approx([1.0, 5.0])


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), min_size=1, max_size=8))
@settings(deadline=None)
def test_all_end_and_the_link_carries_no_more_than_it_can(
    transfers: list[tuple[float, float]],
) -> None:
    ends_s = ends_of(transfers)
    for (begin_s, alone_s), end_s in zip(transfers, ends_s, strict=True):
        assert end_s >= begin_s + alone_s - 1e-6
    # As long as anything is there, the link is busy.
    last_s = 0.0
    for begin_s, alone_s in sorted(transfers):
        last_s = max(last_s, begin_s) + alone_s
    assert max(ends_s) == pytest.approx(last_s, abs=1e-6)


def test_what_happens_is_in_order_and_an_event_is_waited_for_once() -> None:
    link, came, event = SharedLink(), list[tuple[float, str]](), Event()

    def wait(name: str, *waits: float | Event) -> Process:
        yield from waits
        came.append((link.now_s, name))

    def ring() -> Process:
        yield 2.5
        event.happen()

    for name, at_s in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("B", 2.0)):
        link.go_on(wait(name, at_s))
    for process in (wait("rung", event), wait("late", 4.0, event, 0.5), ring()):
        link.go_on(process)
    link.run()
    assert came == [*((1.0, "a"), (2.0, "b"), (2.0, "B"), (2.5, "rung"), (3.0, "c"), (4.5, "late"))]
