"""Which optimizers may be run on a part of their parameters, or on a part of one."""

from __future__ import annotations

import torch

__all__ = ["is_elementwise", "why_not_deferred"]

#: Classes whose update of one element depends on that element alone.
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

#: Those whose update of one parameter depends on that parameter alone. Exact classes: a subclass
#: may do anything.
SEPARABLE: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in (*_ELEMENTWISE, "Adafactor")
    if hasattr(torch.optim, name)
)


def why_not_deferred(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why ``optimizer``, updated by ``kind``, cannot be bundle by bundle; empty if it can."""
    if kind not in SEPARABLE:
        return f"{kind.__name__} is not known to update each parameter on its own"
    if not hasattr(kind.step, "__wrapped__") and not hasattr(kind.step, "hooked"):
        return f"{kind.__name__}.step has been replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True"
    return ""


def is_elementwise(name: str) -> bool:
    """True if an optimizer of that name may be given any part of a parameter."""
    return name in _ELEMENTWISE
