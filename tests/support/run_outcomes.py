"""What the ranks of `bytesched run` print of their cases."""

from __future__ import annotations

import json
from typing import Any

from ranks import ExitedRank

#: far below the size of a layer
SMALL = {"BYTESCHED_PARTITION_BYTES": "256", "BYTESCHED_CREDIT_BYTES": "512"}

Outcomes = dict[str, dict[str, Any]]


def outcomes(rank: ExitedRank) -> Outcomes:
    assert rank.code == 0, rank.stderr
    lines = [json.loads(line) for line in rank.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


def left(said: list[str]) -> list[str]:
    return [line for line in said if "left as it was" in line]
