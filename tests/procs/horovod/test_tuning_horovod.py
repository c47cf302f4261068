"""A Horovod session whose sizes change all the time trains as plain Horovod does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import horovod_scripts as scripts
import pytest
import scripts_gradients as gradients
import scripts_optimizers as optimizers
import scripts_reading as reading
from ranks import address_of
from training import compare

if TYPE_CHECKING:
    from ranks import Ranks

pytestmark = pytest.mark.procs

Pools = Callable[[int], "Ranks"]


@pytest.mark.parametrize(
    ("script", "args"),
    [
        (optimizers.one_optimizer, ("adamw_foreach",)),
        (scripts.accumulated, (2,)),
        (scripts.clipped, ()),
        (scripts.grouped, (2, 1)),
        (scripts.half_on_the_wire, ("Average", 1.0, 1.0)),
        (gradients.gradients_kept, ()),
        (reading.evaluated, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.one_in(3)
def test_script(hvd_gloo: Pools, script: Callable[..., None], args: tuple[object, ...]) -> None:
    from horovod_training import RestlessHorovodJob

    outcomes = hvd_gloo(2).run(compare, address_of(script), args, {}, 0.0, RestlessHorovodJob)
    for rank, (found, _) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
    assert int(outcomes[0][1]["settings"]) >= 2
