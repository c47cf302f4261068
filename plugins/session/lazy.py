"""Lazy gradients that a user has put aside, or gets back."""

from __future__ import annotations

from sys import getrefcount

from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.proxies.pending import free, has_aliases, keep_apart, plain

__all__ = ["give_back", "is_kept", "is_seen"]


def _own_references() -> int:
    """What getrefcount returns for a lazy gradient that the slot and a local variable refer to."""
    holder = [object()]
    lazy = holder[0]
    return getrefcount(lazy)


_OWN_REFERENCES = _own_references()


def is_kept(slot: Slot) -> bool:
    """True if the user has put the lazy gradient aside: it is to keep its values."""
    lazy = slot.lazy
    return getrefcount(lazy) > _OWN_REFERENCES and slot.parameter.grad is not lazy


def is_seen(slot: Slot) -> bool:
    """True if the user has put a view of it aside: the view is to keep its values."""
    # A desk hands out views without a read.
    may_be = slot.is_read or slot.desk is not None
    return may_be and slot.parameter.grad is not slot.lazy and has_aliases(slot.lazy)


def give_back(slot: Slot) -> None:
    """Makes the gradient of ``slot`` an ordinary tensor, for good."""
    if is_kept(slot) or is_seen(slot):
        keep_apart(slot.lazy)
    if slot.parameter.grad is slot.lazy:
        slot.parameter.grad = plain(slot.lazy)
    free(slot.lazy)
