"""Messages of the second phase begin where they delay none of the first."""

from __future__ import annotations

import pytest

from bytesched.plugins.c10d.split.forecast import Forecast

#: what goes through the link in a millisecond
MS_BYTES = 1_000_000

#: when each message is put in, and how long it takes, in ms
Round = list[tuple[float, float]]


def foretold(messages: Round, put: int = 0, *, began_s: float = 100.0) -> Forecast:
    """A forecast from one round of ``messages``, of which the next one has put in so many."""
    forecast = Forecast()
    forecast.begin_round(0.0)
    ended_s = 0.0
    for at_ms, takes_ms in messages:
        nbytes = int(takes_ms * MS_BYTES)
        forecast.put(at_ms / 1e3, nbytes)
        begins_s = max(at_ms / 1e3, ended_s)
        ended_s = begins_s + takes_ms / 1e3
        forecast.sent(at_ms / 1e3, ended_s, nbytes)
    forecast.begin_round(began_s)
    for at_ms, takes_ms in messages[:put]:
        forecast.put(began_s + at_ms / 1e3, int(takes_ms * MS_BYTES))
    return forecast


@pytest.mark.parametrize(
    ("takes_ms", "fits"),
    [
        pytest.param(20.0, True, id="in the gap before the next"),
        pytest.param(30.0, True, id="later gaps take up the delay"),
        pytest.param(80.0, False, id="the last would end later"),
    ],
)
def test_there_is_room_where_the_end_stays(takes_ms: float, fits: bool) -> None:
    messages = [(0.0, 5.0), (30.0, 5.0), (60.0, 5.0), (90.0, 5.0)]
    forecast = foretold(messages, put=1)
    assert forecast.has_room(100.006, int(takes_ms * MS_BYTES)) is fits


def test_no_room_just_before_the_last() -> None:
    forecast = foretold([(0.0, 5.0), (30.0, 5.0)], put=1)
    assert forecast.has_room(100.010, 10 * MS_BYTES)
    assert not forecast.has_room(100.025, 10 * MS_BYTES)
    # Unless it is short.
    assert forecast.has_room(100.025, MS_BYTES // 2)


def test_a_link_that_is_never_idle_has_no_room() -> None:
    forecast = foretold([(10.0 * i, 12.0) for i in range(10)], put=3)
    assert not forecast.has_room(100.030, 5 * MS_BYTES)


def test_room_without_a_last_round_and_when_all_is_put_in() -> None:
    assert Forecast().has_room(1.0, 1 << 30)
    forecast = foretold([(0.0, 5.0), (30.0, 5.0)], put=2)
    assert forecast.is_over
    assert forecast.has_room(100.030, 1 << 30)


def test_a_round_that_does_not_go_on_is_not_waited_for() -> None:
    forecast = foretold([(0.0, 5.0), (30.0, 5.0)], put=1)
    assert not forecast.has_room(100.035, 10 * MS_BYTES)
    assert forecast.has_room(100.055, 10 * MS_BYTES)


def test_of_messages_that_overlap_the_link_is_counted_once() -> None:
    forecast = foretold([(0.0, 10.0), (0.0, 10.0), (0.0, 10.0)])
    assert "1000.0 MB/s" in repr(forecast)
