"""The sharded update of one session: owners, and what they do in ``step()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from bytesched.observe import Observers

from ..dependency.failures import Failures
from ..figures.meter import Meter
from ..planned.bundles import Slot
from ..planned.rounds import OpenUpdates
from ..planned.sending import Sending
from ..planned.updates import Updates
from ..planned.wire import Exchanging
from ..routes.groups.group import Group
from .owners import Owners
from .updates import ShardedUpdates

__all__ = ["sharding"]


def sharding(
    wire: Exchanging,
    group: Group,
    base: dist.ProcessGroup,
    reduced: Sequence[nn.Parameter],
    run_bytes: int,
) -> OpenUpdates:
    """Opens the owners of a session; see `Owners`."""

    def opened(
        slots: Sequence[Slot],
        sending: Sending,
        failures: Failures,
        meter: Meter,
        observers: Observers,
        **named: Any,
    ) -> tuple[Owners, Updates]:
        owners = Owners(
            slots, wire, group, base, reduced, failures, meter, observers, run_bytes=run_bytes
        )
        return owners, ShardedUpdates(slots, owners, sending, failures, meter, **named)

    return opened
