"""Plans of tensor parallelism as torch runs them: the losses of one process."""

from __future__ import annotations

import pytest
from parallel_cases import STEPS, losses
from ranks import Ranks

pytestmark = pytest.mark.procs


def test_losses_are_those_of_one_process(two_ranks: Ranks) -> None:
    for found in two_ranks.run(losses):
        assert set(found) == {"mlp", "transformer"}
        for far in found.values():
            assert len(far) == STEPS
            assert max(far) < 1e-12
