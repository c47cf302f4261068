"""What a session says about itself."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from bytesched.observe import Observers
from bytesched.plugins.session.carrier import Traffic
from bytesched.plugins.session.meter import Meter


def steps(crossing_bytes: int, count: int) -> Meter:
    """A meter after so many steps of a model with 1000 bytes of gradients."""
    meter = Meter(Observers(), parameters=1)
    plan: Any = SimpleNamespace(nbytes=1000, chunks=[])
    meter.active(plan, partition_bytes=100, credit_bytes=200)
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
