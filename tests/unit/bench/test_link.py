"""Measurements of a bench's link."""

from __future__ import annotations

from collections.abc import Iterator

from bytesched.plugins.bench.link import SETTLING_PROBES, agree, settled


def test_a_link_whose_first_measurements_are_off_is_measured_until_two_agree() -> None:
    rates: Iterator[float] = iter([40e6, 71e6, 118e6, 119e6, 60e6])

    assert settled(lambda: next(rates)) == [118e6, 119e6]
    assert next(rates) == 60e6


def test_a_link_that_never_settles_is_measured_a_few_times() -> None:
    rates = iter([50e6, 100e6] * SETTLING_PROBES)

    last = settled(lambda: next(rates))
    assert last == [50e6, 100e6]
    assert not agree(*last)
    assert len(list(rates)) == SETTLING_PROBES
