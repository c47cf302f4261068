"""Jobs that take turns on the devices of one machine: the same bits as alone, and none waits for
another that is gone."""

from __future__ import annotations

from pathlib import Path

import shared_training
from sharing_jobs import sharing

SCRIPT = Path(shared_training.__file__)


def test_two_jobs_take_turns_with_the_bits_of_each_alone() -> None:
    with sharing(SCRIPT, 2, options=["--set", "share="]) as (alone,):
        (first, _) = expected = alone.found()
    assert first["turns"] == 0
    with sharing(SCRIPT, 2, 2) as jobs:
        found = [job.found() for job in jobs]
    for ranks in found:
        for rank, one in zip(ranks, expected, strict=True):
            assert rank["losses"] == one["losses"]
            assert rank["weights"] == one["weights"]
            assert rank["mode"] == "cross"
            # A forward pass and the backward pass after it at least.
            assert rank["turns"] >= shared_training.STEPS
            assert rank["turns_ended"] == 0


def test_a_job_goes_on_beside_one_that_is_killed() -> None:
    with sharing(SCRIPT, 2, 2, 2, arguments=["3"]) as (killed, *others):
        killed.kill()
        found = [job.found() for job in others]
    assert found[0] == found[1] or found[0][0]["losses"] == found[1][0]["losses"]


def test_jobs_of_other_numbers_of_ranks() -> None:
    with sharing(SCRIPT, 1, 2, 3) as jobs:
        found = [job.found() for job in jobs]
    assert [rank["turns"] > 0 for rank in found[1]] == [True, True]
    assert [rank["turns"] > 0 for rank in found[2]] == [True, True, True]
