"""What a session runs with, changed between two steps: no value does, nor what a user holds."""

from __future__ import annotations

from dataclasses import replace

from bytesched.tunable import Setting

from ..dependency.context import PlanParts
from ..dependency.lazy import give_back
from ..figures.meter import Meter
from ..routes.handover import Handover

__all__ = ["Changing"]


class Changing:
    """Cuts the plan again, and gives gradients back to the framework or takes them.

    Args:
        setting: the one that ``parts`` were made for.
    """

    def __init__(
        self, parts: PlanParts, handover: Handover, meter: Meter, setting: Setting
    ) -> None:
        self._parts = parts
        self._handover = handover
        self._meter = meter
        self._setting = replace(setting, enabled=True)

    def apply(self, setting: Setting) -> None:
        """Goes on with ``setting``; between the same two steps on all ranks.

        Nothing may be outstanding.
        """
        if setting == self._setting:
            return
        if setting.enabled is self._handover.off:
            self._switch(off=not setting.enabled)
        if setting.enabled:
            parts = self._parts
            parts.plan.cut(setting.partition_bytes)
            for part in (parts.packer, parts.synchronizing, parts.gates):
                part.plan_cut()
            parts.carrier.change(setting)
            self._meter.changed(len(parts.plan.chunks), setting)
        self._setting = setting

    def is_applied(self, setting: Setting) -> bool:
        """Whether ``apply`` would do nothing."""
        return setting == self._setting

    def _switch(self, *, off: bool) -> None:
        if off:
            self._handover.off = True
            for slot in self._parts.plan.slots:
                give_back(slot)
            self._handover.give_back()
        else:
            self._handover.take()
