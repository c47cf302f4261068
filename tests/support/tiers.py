"""Which cases of a test with many every change is tried with; the others are nightly."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["is_tried"]


def is_tried(number: int, sizes: Iterable[int], one_in: int) -> bool:
    """Whether a case is one of so many: by the sum of its places in all lists of values.

    So the values of each list take turns with those of the others, and no value is always left
    out. ``sizes``: of the lists, of which the first one is gone through for each value of the next.
    """
    places = 0
    for size in sizes:
        number, place = divmod(number, size)
        places += place
    return places % one_in == 0
