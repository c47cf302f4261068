"""What stands for a gradient that was folded and released: every read of it is refused."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import nn

from bytesched.errors import PluginError

from ..proxies.pending_grads import PendingGrad, make_plain

__all__ = ["stand_in"]


def stand_in(name: str, parameter: nn.Parameter, known: torch.Tensor | None) -> torch.Tensor:
    """A gradient of ``parameter``, without memory, of which any read raises `PluginError`.

    Args:
        known: one that was made before, which is returned if it is one still.
    """
    if type(known) is PendingGrad:
        return known
    # What reads it from C++ cannot be refused.
    nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    made: Any = nothing.expand(parameter.shape)
    made.__class__ = PendingGrad
    made.sum_ = _Released(name, made)
    gradient: torch.Tensor = made
    return gradient


class _Released:
    """What such a gradient waits for, in vain; see `Sum`."""

    #: no question about it can be answered without it
    taken = True

    def __init__(self, name: str, gradient: PendingGrad) -> None:
        self._name = name
        self._gradient = ref(gradient)

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """See `Sum`."""
        return NotImplemented

    def settle(self) -> None:
        """See `Sum`."""
        raise PluginError(
            f"the gradient of {self._name!r} has been folded into Adam's moments and released "
            "(accumulate='adama'): clipping by norm, GradScaler and whatever else reads p.grad "
            "need training without it"
        )

    def zeroes(self) -> bool:
        """See `Sum`: it gets memory of its own."""
        gradient = self._gradient()
        if gradient is not None:
            make_plain(gradient)
            gradient.data = torch.empty(
                gradient.shape, dtype=gradient.dtype, device=gradient.device
            )
        return True
