"""The first error of a session: final, and told to all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from together import together

from bytesched.errors import PeerLost, PluginError, SchedulerTimeout
from bytesched.plugins.failures import Failures


class Peers:
    def __init__(self) -> None:
        self.told: list[str] = []

    def leave_note(self, text: str) -> None:
        self.told.append(text)

    def abort(self) -> None:
        self.told.append("abort")


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def failures(peers: Peers) -> Failures:
    return Failures(peers)


def test_without_an_error_nothing_is_raised(failures: Failures, peers: Peers) -> None:
    failures.check()
    assert (failures.error, failures.is_error_seen, peers.told) == (None, False, [])


def test_the_first_error_is_final_and_peers_are_told_of_it_once(
    failures: Failures, peers: Peers
) -> None:
    first = PluginError("the first\nin two lines")
    failures.fail(first)
    failures.fail(SchedulerTimeout("the second"))
    assert failures.error is first
    assert peers.told == ["PluginError: the first", "abort"]
    for _ in range(2):
        with pytest.raises(PluginError, match="the first"):
            failures.check()


def test_of_several_threads_one_is_first(failures: Failures, peers: Peers) -> None:
    errors = [PluginError(f"of thread {number}") for number in range(8)]
    together(lambda number: failures.fail(errors[number]), len(errors))
    assert failures.error in errors
    assert peers.told == [f"PluginError: {failures.error}", "abort"]


def test_an_error_is_seen_when_it_is_raised(failures: Failures) -> None:
    failures.fail(PluginError("lost"))
    assert not failures.is_error_seen
    with pytest.raises(PluginError):
        failures.check()
    assert failures.is_error_seen


def test_an_error_that_is_raised_at_once_counts_as_seen(failures: Failures) -> None:
    failures.fail(PluginError("lost"))
    failures.fail(PluginError("another"), is_raised=True)
    assert failures.is_error_seen


def test_a_raise_does_not_keep_the_frames_of_the_last_one(failures: Failures) -> None:
    failures.fail(PluginError("lost"))
    depths = []
    for _ in range(3):
        with pytest.raises(PluginError) as raised:
            failures.check()
        depths.append(len(raised.traceback))
    assert len(set(depths)) == 1


def test_peers_are_told_of_what_has_brought_it_about(failures: Failures, peers: Peers) -> None:
    failures.fail(PluginError("some gradients had been sent"), cause=MemoryError("out of memory"))
    assert peers.told == ["MemoryError: out of memory", "abort"]


@pytest.mark.parametrize(("of", "told"), [((), ["abort"]), ((2,), ["PeerLost: gone", "abort"])])
def test_a_lost_peer_is_told_on_if_it_is_known(
    failures: Failures, peers: Peers, of: Any, told: list[str]
) -> None:
    """What has come of another rank's end says nothing that the others do not see."""
    failures.fail(PeerLost("gone", peers=of))
    assert peers.told == told


def test_what_comes_of_the_first_error_is_not_told_in_its_place(failures: Failures) -> None:
    first = PluginError("the first")
    first.__cause__ = cause = MemoryError("out of memory")
    failures.fail(first)
    with pytest.raises(PluginError, match="the first") as raised:
        failures.raise_first(PeerLost("connections are broken"))
    assert raised.value.__cause__ is cause
    # But what is not of the wire has its own cause.
    with pytest.raises(ValueError, match="of the script"):
        failures.raise_first(ValueError("of the script"))


def test_an_error_of_the_wire_is_the_first_where_there_was_none(failures: Failures) -> None:
    error = PeerLost("gone", peers=[1])
    with pytest.raises(PeerLost) as raised:
        failures.raise_first(error)
    assert raised.value is failures.error is error
    assert failures.is_error_seen
