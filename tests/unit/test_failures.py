"""The first error of a session: final, and told to all ranks."""

from __future__ import annotations

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


PEERS = Peers()


@pytest.fixture
def failures() -> Failures:
    PEERS.told.clear()
    return Failures(PEERS)


@pytest.mark.parametrize(
    ("error", "cause", "note"),
    [
        (PluginError("the first\nin two lines"), None, ["PluginError: the first"]),
        # What has brought it about.
        (PluginError("not all sent"), MemoryError("no room"), ["MemoryError: no room"]),
        # What has come of another rank's end says nothing that the others do not see.
        (PeerLost("gone"), None, []),
        (PeerLost("gone", peers=(2,)), None, ["PeerLost: gone"]),
    ],
)
def test_the_first_error_is_final_and_peers_are_told_of_it_once(
    failures: Failures, error: Exception, cause: Exception | None, note: list[str]
) -> None:
    failures.fail(error, cause=cause)
    failures.fail(SchedulerTimeout("the second"))
    assert PEERS.told == [*note, "abort"]
    depths = []
    for _ in range(3):
        with pytest.raises(type(error)) as raised:
            failures.check()
        assert raised.value is failures.error is error
        depths.append(len(raised.traceback))
    assert len(set(depths)) == 1, "a raise keeps the frames of the last one"


def test_of_several_threads_one_is_first(failures: Failures) -> None:
    errors = [PluginError(f"of thread {number}") for number in range(8)]
    together(lambda number: failures.fail(errors[number]), len(errors))
    assert failures.error in errors
    assert PEERS.told == [f"PluginError: {failures.error}", "abort"]


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
