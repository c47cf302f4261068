"""Lazy gradients that a user has put aside, or gets back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from sys import getrefcount

import torch

from ..layout.memory import is_laid_out_as, lies_over
from ..layout.slots import Slot
from ..proxies.lazy_grads import free, has_aliases, has_own_memory, keep_apart, lazy_over, settle

__all__ = ["give_back", "is_left", "kept_or_seen", "moved", "withhold"]


def _own_references() -> int:
    """What getrefcount returns for a lazy gradient that the slot and a local variable refer to."""
    holder = [object()]
    lazy = holder[0]
    return getrefcount(lazy)


_OWN_REFERENCES = _own_references()


def kept_or_seen(slots: Iterable[Slot]) -> list[Slot]:
    """Those whose lazy gradient, or a view of it, the user has put aside."""
    found = []
    for slot in slots:
        lazy = slot.lazy
        is_referred_to = getrefcount(lazy) > _OWN_REFERENCES
        may_be = is_referred_to or slot.is_read
        if may_be and slot.parameter.grad is not lazy and (is_referred_to or has_aliases(lazy)):
            found.append(slot)
    return found


def moved(slots: Iterable[Slot]) -> list[Slot]:
    """Those whose lazy gradient has been given other memory, or another shape."""
    found = []
    with torch._C.DisableTorchFunctionSubclass():
        for slot in slots:
            lazy, view = slot.lazy, slot.view
            # Nearly always: no call for those.
            is_alike = lazy.shape == view.shape and lazy.stride() == view.stride()
            if (
                lazy.data_ptr() != view.data_ptr()
                or not ((is_alike and lazy.dtype is view.dtype) or is_laid_out_as(lazy, view))
                or has_own_memory(lazy)
            ):
                found.append(slot)
    return found


def is_left(slot: Slot) -> bool:
    """True if the gradient is what was handed out, not zeroed and not replaced."""
    return slot.parameter.grad is slot.lazy and lies_over(slot.lazy, slot.view)


def give_back(slot: Slot) -> None:
    """Makes the gradient of ``slot`` an ordinary tensor, for good."""
    if kept_or_seen([slot]):
        keep_apart(slot.lazy)
    if slot.parameter.grad is slot.lazy:
        settle(slot.lazy)
        slot.lazy = lazy_over(torch.empty(0, device="cpu"))
    free(slot.lazy)


def withhold(slot: Slot, refuse: Callable[[], None]) -> None:
    """In a forked child, where the values of ``slot``'s gradient never come: reads call ``refuse``.

    It can be zeroed still.
    """
    if not lies_over(slot.lazy, slot.view):
        # Of the script's own making.
        give_back(slot)
        return
    # A child has no devices, and no threads for kernels. No kernel over its memory: the threads
    # that share it out are the parent's, and so are the pages.
    with torch._C.DisableTorchFunctionSubclass():
        slot.lazy.data = torch.full((), torch.nan, dtype=slot.view.dtype).expand_as(slot.view)
    free(slot.lazy)
    slot.lazy.synchronize, slot.lazy.is_taken = refuse, _true


def _true() -> bool:
    return True
