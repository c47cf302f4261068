"""What the parts of one session share: for its whole life, and for one plan."""

from __future__ import annotations

from dataclasses import dataclass

from bytesched.observe import Observers
from bytesched.tunable import Setting

from ..figures.meter import Meter
from ..layout.packing import Packer
from ..layout.plan import Plan
from ..routes.backend import Backend
from ..routes.carrier import Carrier
from ..routes.streams import Streams
from .gates import Gates
from .progress import Progress
from .synchronizing import Synchronizing

__all__ = ["Context", "PlanParts"]


@dataclass(frozen=True, eq=False)
class Context:
    """What the parts of one session share for its whole life."""

    backend: Backend
    progress: Progress
    streams: Streams
    meter: Meter
    observers: Observers


@dataclass(frozen=True, eq=False)
class PlanParts:
    """What knows chunks or bundles."""

    plan: Plan
    packer: Packer
    synchronizing: Synchronizing
    gates: Gates
    carrier: Carrier

    def plan_cut(self) -> None:
        """Whatever knows chunks or bundles learns that the plan has been cut."""
        for part in (self.packer, self.synchronizing, self.gates):
            part.plan_cut()

    def cut_whole(self, setting: Setting) -> None:
        """Cuts the plan for whole all-reduces under ``setting``; nothing may be under way."""
        self.plan.cut(setting.partition_bytes)
        self.plan_cut()
        self.carrier.change(setting)
