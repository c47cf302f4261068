"""What the ranks of `bytesched run` print of their cases."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from ranks import ExitedRank

#: far below the size of a layer
SMALL = {
    "BYTESCHED_PARTITION_BYTES": "256",
    "BYTESCHED_CREDIT_BYTES": "512",
    "BYTESCHED_GUARD": "0",
}

Outcomes = dict[str, dict[str, Any]]


def outcomes(rank: ExitedRank) -> Outcomes:
    assert rank.code == 0, rank.stderr
    lines = [json.loads(line) for line in rank.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


def left(said: list[str]) -> list[str]:
    return [line for line in said if "left as it was" in line]


def selected(
    request: pytest.FixtureRequest, cases: Iterable[str], always: Iterable[str]
) -> list[str]:
    """The cases of a file that its selected tests are about, and others."""
    items = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    return [name for name in cases if name in {*names, *always}]
