"""What a session runs with, changed between two steps: no value does, nor what a user holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.session.carrier import Carrier
from bytesched.plugins.session.gates import Gates
from bytesched.plugins.session.meter import Meter
from bytesched.plugins.session.rounds import Rounds
from bytesched.plugins.session.settling import Settling
from bytesched.plugins.session.stepping import Stepping
from bytesched.tunable import Setting

__all__ = ["Changing", "Parts"]


@dataclass(frozen=True, eq=False)
class Parts:
    """What knows chunks or bundles, once there are any."""

    plan: Plan
    packer: Packer
    settling: Settling
    gates: Gates
    carrier: Carrier


class Changing:
    """Cuts the plan again, and gives gradients back to the framework or takes them."""

    def __init__(self, rounds: Rounds, stepping: Stepping, meter: Meter) -> None:
        self._rounds = rounds
        self._stepping = stepping
        self._meter = meter
        self._take: Callable[[], Callable[[], None]] | None = None
        self._give_back: Callable[[], None] | None = None
        # - after the warm-up
        self._parts: Parts
        self._setting: Setting

    def take_over(self, take: Callable[[], Callable[[], None]], *, can_stop: bool) -> None:
        """``take`` makes gradients the session's; what it returns makes them the framework's.

        With ``can_stop``, both may happen several times.
        """
        self._give_back = take()
        self._take = take if can_stop else None

    def give_back(self) -> None:
        """Gradients are the framework's, as they may be already."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    @property
    def knobs(self) -> frozenset[str]:
        """What can be changed beside what the backend can, of `tunable.KNOBS`."""
        return frozenset() if self._take is None else frozenset({"enabled"})

    def activate(self, parts: Parts, setting: Setting) -> None:
        """The warm-up is over, with the sizes of ``setting``."""
        self._parts = parts
        self._setting = replace(setting, enabled=True)

    def apply(self, setting: Setting) -> None:
        """Goes on with ``setting``; between the same two steps on all ranks.

        Nothing may be outstanding.
        """
        if setting == self._setting:
            return
        if setting.enabled is self._stepping.off:
            self._switch(off=not setting.enabled)
        if setting.enabled:
            parts = self._parts
            parts.plan.cut(setting.partition_bytes)
            for part in (parts.packer, parts.settling, parts.gates):
                part.plan_cut()
            parts.carrier.change(setting)
            self._meter.changed(setting.partition_bytes, setting.credit_bytes)
        self._setting = setting

    def is_applied(self, setting: Setting) -> bool:
        """Whether ``apply`` would do nothing."""
        return setting == self._setting

    def _switch(self, *, off: bool) -> None:
        assert self._take is not None
        self._rounds.off = self._stepping.off = off
        if off:
            for slot in self._rounds.slots:
                self._rounds.give_back(slot)
            self.give_back()
        else:
            self._give_back = self._take()
