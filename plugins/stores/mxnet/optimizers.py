"""Which of MXNet's optimizers can update a key in chunks."""

from __future__ import annotations

from typing import Any

__all__ = ["why_whole"]

#: Those that treat every element on its own, and whose state is per key or per element.
_ELEMENTWISE = frozenset(
    {"SGD", "NAG", "Adam", "AdaGrad", "RMSProp", "AdaDelta", "Ftrl", "FTML", "Adamax", "Signum"}
)


def why_whole(optimizer: Any) -> str:
    """Why an optimizer on the servers needs every key as a whole, or nothing."""
    name = type(optimizer).__name__
    if type(optimizer).__module__ != "mxnet.optimizer.optimizer" or name not in _ELEMENTWISE:
        return f"{name} is not known to treat every element on its own"
    if optimizer.idx2name or optimizer.lr_mult or optimizer.wd_mult:
        return f"{name} has settings for single keys"
    if optimizer.multi_precision:
        return f"{name} keeps a copy of each key in float32"
    return ""
