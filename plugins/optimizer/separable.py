"""Which optimizers may be run on a part of their parameters, or on a part of one."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakSet

import torch

from bytesched.errors import PluginError
from bytesched.plugins.optimizer.probe import why_not_separable
from bytesched.plugins.optimizer.stepping import is_hooked

__all__ = ["is_elementwise", "separable", "why_not_deferred"]

OptimizerT = TypeVar("OptimizerT", bound=type[torch.optim.Optimizer])

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
    for name in (*_ELEMENTWISE, "Adafactor", "Muon")
    if hasattr(torch.optim, name)
)

#: by their users' word
_vouched_for: WeakSet[type] = WeakSet()


def separable(kind: OptimizerT) -> OptimizerT:
    """See :func:`bytesched.separable`."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise PluginError(f"{kind!r} is not a class of torch optimizers")
    _vouched_for.add(kind)
    return kind


def why_not_deferred(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why ``optimizer``, updated by ``kind``, cannot be bundle by bundle; empty if it can."""
    if not is_hooked(kind):
        return f"{kind.__name__}.step has been replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True"
    if kind in SEPARABLE or kind in _vouched_for:
        return ""
    return why_not_separable(optimizer, kind)


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    """True if an optimizer of that very class may be given any part of a parameter."""
    return kind.__name__ in _ELEMENTWISE and kind is getattr(torch.optim, kind.__name__, None)
