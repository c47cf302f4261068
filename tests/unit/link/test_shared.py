"""A link that transfers share."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.link.shared import SharedLink


def ends_of(transfers: list[tuple[float, float]]) -> list[float]:
    """When each transfer ends, of pairs: when it begins, and how long it takes alone."""
    link = SharedLink()
    ends_s = [-1.0] * len(transfers)

    def begin(index: int, alone_s: float) -> None:
        link.start(alone_s, lambda: ends_s.__setitem__(index, link.now_s))

    for index, (at_s, alone_s) in enumerate(transfers):
        link.after(at_s, partial(begin, index, alone_s))
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


def test_what_is_due_is_called_in_order() -> None:
    link, called = SharedLink(), list[tuple[float, str]]()
    for at_s, name in ((3.0, "c"), (1.0, "a"), (2.0, "b"), (2.0, "B")):
        link.after(at_s, lambda name=name: called.append((link.now_s, name)))  # type: ignore[misc]
    link.after(4.0, lambda: link.after(0.5, lambda: called.append((link.now_s, "late"))))
    link.run()
    assert called == [(1.0, "a"), (2.0, "b"), (2.0, "B"), (3.0, "c"), (4.5, "late")]
