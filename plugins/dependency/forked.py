"""A plan in a forked child: no thread there receives or updates anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn

from bytesched.errors import PluginError
from bytesched.round import Round

from ..layout.plan import Plan
from ..layout.slots import Job, Slot
from ..proxies.pending import hold, is_held, release
from .lazy import withhold

__all__ = ["disown", "refuse"]


def disown(round_: Round[Slot, Job], plan: Plan, give_back: Callable[[Slot], None] | None) -> None:
    """Parameters and gradients are ordinary ones; those that will not come raise PluginError.

    Args:
        give_back: makes the gradient of a slot an ordinary one; None: those are left as they are.
    """
    lost, stale = map(set, round_.fork())
    for slot in plan.slots:
        if slot in stale:
            hold(slot.parameter, partial(refuse, slot.name))
        elif is_held(slot.parameter):
            release(slot.parameter)
        if give_back is None:
            continue
        if slot in lost:
            withhold(slot, partial(refuse, f"{slot.name}.grad"))
        else:
            give_back(slot)


def refuse(name: str) -> NoReturn:
    """``name`` is used in a forked child, where it will not come."""
    raise PluginError(
        f"{name!r} was outstanding when this process was forked, and nothing completes it here"
    )
