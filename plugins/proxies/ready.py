"""Tensors that wait, among others: waited for, and their memory looked at."""

from __future__ import annotations

from typing import Any

import torch

from .pending import PendingParameter, synchronize_now
from .pending_grads import PendingGrad

__all__ = ["has_aliases", "ready"]


def ready(values: Any) -> None:
    """Waits for every tensor among ``values``, which may be nested, that is outstanding."""
    # Not by `tensors_in`: this is in front of every message between ranks.
    kind = type(values)
    if kind is PendingParameter:
        synchronize_now(values)
    elif kind is PendingGrad:
        values.sum_.settle()
    elif isinstance(values, (list, tuple)):
        for value in values:
            ready(value)
    elif isinstance(values, dict):
        for value in values.values():
            ready(value)


def has_aliases(tensor: torch.Tensor) -> bool:
    """True if there are other tensors over the memory of ``tensor``; does not wait for it."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
        # One of them is ``storage`` itself.
        return torch._C._storage_Use_Count(storage._cdata) > 2
