"""Two jobs share one GPU and take turns: each has the bits of its run alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import gpu_sharing as scripts
import shared_training
from cuda_tests import ON_CUDA, needs_nccl
from ranks import Ranks
from sharing_jobs import sharing

pytestmark = ON_CUDA


@needs_nccl
def test_jobs_of_one_rank_over_nccl(
    two_ranks: Ranks, record_property: Callable[[str, object], None]
) -> None:
    found = two_ranks.run(scripts.in_turns, f"test-{uuid.uuid4().hex}")
    for number, (wrong, figures) in enumerate(found):
        record_property(f"job {number}", figures)
        print(f"job {number}:", ", ".join(f"{name} {n:.4g}" for name, n in figures.items()))
        assert not wrong, f"job {number}:\n" + "\n".join(wrong)


def test_jobs_of_two_ranks_over_gloo() -> None:
    """All four ranks stand in one queue, that of the device."""
    script, arguments = Path(shared_training.__file__), ["cuda"]
    with sharing(script, 2, options=["--set", "share="], arguments=arguments) as (job,):
        alone = job.found()
    with sharing(script, 2, 2, arguments=arguments) as jobs:
        together = [job.found() for job in jobs]
    for ranks in together:
        for rank, expected in zip(ranks, alone, strict=True):
            assert rank["losses"] == expected["losses"]
            assert rank["weights"] == expected["weights"]
            assert rank["mode"] == "cross"
            assert rank["turns"] >= shared_training.STEPS
    print("turns that came to their limit:", [[r["turns_ended"] for r in j] for j in together])
