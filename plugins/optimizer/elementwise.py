"""Optimizers that update each element by itself."""

from __future__ import annotations

__all__ = ["is_elementwise"]

#: Classes whose update of one element depends on that element alone: keys may be cut anywhere.
_ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)


def is_elementwise(name: str) -> bool:
    """True if an optimizer of that name may be given any part of a parameter."""
    return name in _ELEMENTWISE
