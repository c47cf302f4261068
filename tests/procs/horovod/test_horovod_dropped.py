"""A session over Horovod ends with its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import Ranks

Pools = Callable[[int], "Ranks"]
pytestmark = pytest.mark.procs


@pytest.mark.parametrize("reads", [False, True])
def test_nothing_stays_of_a_model_that_was_dropped(hvd_gloo: Pools, reads: bool) -> None:
    from horovod_training import dropped_in_turn

    for found in hvd_gloo(2).run(dropped_in_turn, 4, reads):
        assert not found
