"""Errors: their tree, and what a transport error tells."""

from __future__ import annotations

import inspect
import pickle

import pytest

import bytesched
from bytesched import errors


def _all_errors() -> list[type[BaseException]]:
    return [
        member
        for _, member in inspect.getmembers(errors, inspect.isclass)
        if issubclass(member, BaseException)
    ]


def test_one_root_catches_all() -> None:
    found = _all_errors()
    assert len(found) == 11
    assert all(issubclass(error, bytesched.BytesschedError) for error in found)


def test_each_is_in_the_picture_and_public() -> None:
    for error in _all_errors():
        assert error.__name__ in (errors.__doc__ or "")
        assert error.__name__ in bytesched.__all__


def test_builtin_errors_catch_their_kind() -> None:
    assert issubclass(bytesched.SchedulerTimeout, TimeoutError)
    assert issubclass(bytesched.PeerLost, ConnectionError)
    assert issubclass(bytesched.ConfigError, ValueError)


@pytest.mark.parametrize(
    "kind", [bytesched.TransportError, bytesched.SchedulerTimeout, bytesched.PeerLost]
)
def test_transport_error_tells_task_rank_and_story(kind: type[bytesched.TransportError]) -> None:
    error = kind("no answer for 5 s", task="chunk 3", rank=0, story=["ready", "sending"])
    lines = str(error).splitlines()
    assert lines[0] == "no answer for 5 s (task chunk 3, seen by rank 0)"
    assert [line.strip() for line in lines[2:]] == ["ready", "sending"]
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is kind
    assert str(copy) == str(error)


def test_transport_error_without_particulars_is_its_message() -> None:
    assert str(bytesched.TransportError("cut")) == "cut"
