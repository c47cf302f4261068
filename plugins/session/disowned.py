"""A plan in a forked child: no thread there receives or updates anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn

from bytesched.errors import PluginError
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.proxies.pending import hold, is_held, release
from bytesched.plugins.session.lazy import withhold

__all__ = ["disown_gradients", "disown_updates"]


def disown_updates(plan: Plan) -> None:
    """Parameters are ordinary ones; those that were not updated raise PluginError when read."""
    for bundle in plan.bundles:
        for slot in bundle.slots:
            if bundle.armed:
                hold(slot.parameter, partial(_refuse, slot.name))
            elif is_held(slot.parameter):
                release(slot.parameter)
        bundle.armed = bundle.held = False


def disown_gradients(plan: Plan, give_back: Callable[[Slot], None]) -> None:
    """Gradients are ordinary ones; those that were not reduced raise PluginError when read."""
    for slot in plan.slots:
        if slot.bundle.sending or slot.bundle.coming:
            withhold(slot, partial(_refuse, f"{slot.name}.grad"), in_child=True)
        else:
            slot.change()
            give_back(slot)


def _refuse(name: str) -> NoReturn:
    raise PluginError(
        f"{name!r} was outstanding when this process was forked, and nothing completes it here"
    )
