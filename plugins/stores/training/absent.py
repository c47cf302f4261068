"""Gradients that are in a store which updates: only their shape and dtype can be read here."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from bytesched.errors import PluginError

from ...planned.buckets import Bucket
from ...planned.hook_source import HookSource
from ...proxies.pending_grads import PendingGrad

__all__ = ["UpdatedSource", "forget_absent"]


class _InStore:
    """What such a gradient waits for, in vain (see `pending_grads.Sum`)."""

    #: what is on its way to here
    chunks: ClassVar[tuple[()]] = ()

    def __init__(self, name: str) -> None:
        self._name = name

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return NotImplemented

    def settle(self) -> None:
        raise PluginError(
            f"the gradient of {self._name!r} is in the store, which updates: it cannot be read, "
            "clipped or changed here; let the workers update (a store without an optimizer)"
        )

    def zeroes(self) -> bool:
        return False


class UpdatedSource(HookSource):
    """Gradients that nobody reads here once they have been handed out.

    The first forward pass shows the order of buckets: those of a first round could not be others
    later, as the store has updated them.
    """

    early_rounds: ClassVar[int] = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # The store has no keys.
        self.is_synced = False

    def lay_out(self, order: Sequence[int]) -> None:
        """Buckets of parameters in ``order`` of their gradients; no round is open."""
        self._lay_out(order)
        self._listener.layout_changes()
        self.is_synced = True

    def _hand_out(self, bucket: Bucket, left: Container[int] = ()) -> bool:
        for member in bucket.members:
            pending: Any = member.parameter.grad
            if type(member.parameter.grad) is torch.Tensor:
                pending.__class__ = PendingGrad
                pending.sum_ = _InStore(member.name)
        return True


def forget_absent(parameters: Iterable[nn.Parameter]) -> None:
    """Parameters whose gradient is in the store have none."""
    for parameter in parameters:
        grad: Any = parameter.grad
        if type(grad) is PendingGrad and type(grad.sum_) is _InStore:
            parameter.grad = None
