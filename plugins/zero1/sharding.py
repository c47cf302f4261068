"""The sharded update of one session: owners, and what they do in ``step()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bytesched.observe import Observers

from ..dependency.failures import Failures
from ..figures.meter import Meter
from ..planned.bundles import Slot
from ..planned.sending import Sending
from ..planned.updates import Updates
from .owners import Owners
from .updates import ShardedUpdates

__all__ = ["Sharding"]


class Sharding(Owners):
    """See `rounds.Owners`."""

    def open(
        self,
        slots: Sequence[Slot],
        sending: Sending,
        failures: Failures,
        meter: Meter,
        observers: Observers,
        **named: Any,
    ) -> Updates:
        """What updates ``slots`` from now on; see `Updates`."""
        updates = ShardedUpdates(slots, self, sending, failures, meter, **named)
        self.begin(slots, failures, meter, observers, updates.apply_all)
        return updates
