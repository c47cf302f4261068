"""What a session runs with, changed between two steps: no value does, nor what a user holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bytesched.tunable import Setting

from ..dependency.lazy import give_back
from ..layout.slots import Slot
from ..routes.handover import Handover

__all__ = ["Changing"]


class Changing:
    """Cuts the plan again, and gives gradients back to the framework or takes them.

    Args:
        slots: whose gradients they are.
        cut: cuts the plan for a setting, and changes what carries its chunks.
        setting: the one in force.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        handover: Handover,
        cut: Callable[[Setting], None],
        setting: Setting,
    ) -> None:
        self._slots = slots
        self._handover = handover
        self._cut = cut
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
            self._cut(setting)
        self._setting = setting

    def is_applied(self, setting: Setting) -> bool:
        """Whether ``apply`` would do nothing."""
        return setting == self._setting

    def _switch(self, *, off: bool) -> None:
        if off:
            self._handover.off = True
            for slot in self._slots:
                give_back(slot)
            self._handover.give_back()
        else:
            self._handover.take()
