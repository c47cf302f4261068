"""The gates of a model: in front of the modules that are really called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ..layout.plan import Plan
from ..layout.slots import Bundle, Slot
from ..proxies.first_use import FirstUse
from ..proxies.hooks import gate
from .synchronizing import Synchronizing

__all__ = ["Gates"]


class Gates:
    """Forward pre-hooks, each of which waits for the bundles of the parameters behind it.

    Args:
        used: the parameters that a forward pass uses, of those of the plan.
    """

    def __init__(
        self,
        plan: Plan,
        used: Iterable[Slot],
        first_use: FirstUse,
        synchronizing: Synchronizing,
        inside_compiled: Callable[[], None],
    ) -> None:
        #: what each gate waits for, and the parameters that it stands before
        self._gated: list[tuple[list[Bundle], list[Slot]]] = []
        self._undo: list[Callable[[], None]] = []
        slots = {id(slot.parameter): slot for slot in plan.slots}
        keys = {id(slot.parameter) for slot in used}
        for module, name, parameters in first_use.gates(lambda p: id(p) in keys):
            bundles: list[Bundle] = []
            self._gated.append((bundles, [slots[id(parameter)] for parameter in parameters]))
            passed = partial(synchronizing.gate, bundles, name)
            self._undo.append(gate(module, passed, inside_compiled))
        self.plan_cut()

    def plan_cut(self) -> None:
        """The plan has other bundles now."""
        for bundles, slots in self._gated:
            bundles[:] = sorted({slot.bundle for slot in slots}, key=lambda bundle: bundle.index)

    def remove(self) -> None:
        """Takes them off."""
        for undo in reversed(self._undo):
            undo()
