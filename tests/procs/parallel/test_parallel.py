"""Plans on real ranks: the losses of one process."""

from __future__ import annotations

import pytest
from parallel_cases import STEPS, losses
from ranks import Ranks

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("form", ["dp", "pp", "pp V", "tp"])
def test_losses_are_those_of_one_process(form: str, two_ranks: Ranks, four_ranks: Ranks) -> None:
    """On two ranks dp, pp or tp alone; on four dp of four, or with two replicas."""
    for ranks in (two_ranks, four_ranks):
        for found in ranks.run(losses, form):
            assert set(found) == {"mlp", "transformer"}
            for far in found.values():
                assert len(far) == STEPS
                assert max(far) < 1e-12
