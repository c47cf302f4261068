"""Jobs that take turns on the devices of one machine: the same bits as alone, and none waits for
another that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import shared_training
from sharing_jobs import sharing

SCRIPT = Path(shared_training.__file__)

Ranks = list[dict[str, Any]]


class Found(NamedTuple):
    alone: Ranks
    together: list[Ranks]


@pytest.fixture(scope="module")
def found() -> Found:
    """A job alone; and two like it beside one that is killed and one with more ranks."""
    with sharing(SCRIPT, 2, options=["--set", "share="]) as (job,):
        alone = job.found()
    with sharing(SCRIPT, 2, 2, 2, 3) as (killed, *jobs):
        killed.wait_for("step 3")
        killed.kill()
        return Found(alone, [job.found() for job in jobs])


def test_jobs_that_take_turns_have_the_bits_of_each_alone(found: Found) -> None:
    for ranks in found.together[:2]:
        for rank, alone in zip(ranks, found.alone, strict=True):
            assert rank["losses"] == alone["losses"]
            assert rank["weights"] == alone["weights"]
            assert rank["mode"] == "cross"


def test_all_ranks_of_all_jobs_take_turns(found: Found) -> None:
    assert [rank["turns"] for rank in found.alone] == [0, 0]
    assert [len(ranks) for ranks in found.together] == [2, 2, 3]
    for ranks in found.together:
        assert all(rank["turns"] >= shared_training.STEPS for rank in ranks)
