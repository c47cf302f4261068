"""Runs the scenarios of a test module, and says what every rank must hold to at its end."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from faults_runner import RankEnd, Runs, Scenario

# Signs of an interpreter that did not end in good order.
CRASHES = ("Fatal Python error", "terminate called", "Segmentation fault", "Exception ignored in")


def selected(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """The body of a module's fixture `runs`: the scenarios that its selected tests are about."""
    items = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    runs = Runs(p["scenario"] for p in parameters if isinstance(p.get("scenario"), Scenario))
    yield runs
    runs.close()


def check_ended_well(end: RankEnd) -> None:
    """It ended by itself and in good order, however it ended: no thread, no broken file."""
    assert not end.hung, end.stderr
    assert not any(crash in end.stderr for crash in CRASHES), end.stderr
    left = end.told.get("threads_left")
    assert left == [], (left, end.stderr)
    check_trace(end)


def check_trace(end: RankEnd) -> None:
    """Its trace file is whole, also after a kill."""
    assert end.trace is not None
    assert json.loads(end.trace), "an empty trace"


def check_told_of(end: RankEnd, errors: set[str]) -> None:
    """A survivor raised one of `errors`, ours, and failed.

    At once, unless it is that of a deadline: no other ends before a run that hangs is ended.
    """
    assert end.told.get("error") in errors, f"{end.told}\n{end.stderr}"
    assert end.told["ours"]
    assert end.code == 1, end.stderr
    check_ended_well(end)
