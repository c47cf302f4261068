"""What a session says about itself."""

from __future__ import annotations

import logging

import pytest

from bytesched.observe import Observers
from bytesched.plugins.session.carrier import Traffic
from bytesched.plugins.session.meter import Meter
from bytesched.tunable import Setting


def steps(crossing_bytes: int, count: int) -> Meter:
    """A meter after so many steps of a model with 1000 bytes of gradients."""
    meter = Meter(Observers(), parameters=1)
    meter.active(1000, 10, Setting(100, 200))
    for _ in range(count):
        meter.stepped(crossing_bytes)
    return meter


@pytest.mark.parametrize(("crossing_bytes", "said"), [(0, 1), (10, 1), (500, 0)])
def test_nothing_to_gain_is_said_once(
    crossing_bytes: int, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="bytesched"):
        steps(crossing_bytes, 200)
    assert sum("little to gain" in message for message in caplog.messages) == said


def test_the_share_that_crossed() -> None:
    figures = steps(250, 4).figures(Traffic())
    assert figures["barrier_crossed_steps"] == 4
    assert figures["barrier_crossed_pct"] == 25.0
