"""Tensors on their way through Horovod: who holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Held"]


class Held:
    """Tensors under keys, the latest for each, held by more than their Python objects.

    Who lets go of a tensor that only its Python object holds besides needs the interpreter's lock
    (torch 2.10 and later, c10/util/intrusive_ptr.h). Horovod's thread lets go of everything that
    was announced when it shuts down, with its queue locked, where a thread that has that lock may
    be about to announce something: both would wait for ever.
    """

    def __init__(self) -> None:
        self._held: dict[int | str, tuple[Tensor, Tensor]] = {}
        #: what was held before, and has not been held again
        self._before: dict[int | str, tuple[Tensor, Tensor]] = {}

    def hold(self, key: int | str, tensor: Tensor) -> None:
        """From now on ``tensor`` is held under ``key``, and what was before is not."""
        held = self._held.get(key) or self._before.pop(key, None)
        if held is None or held[0] is not tensor:
            held = tensor, _holder(tensor)
        self._held[key] = held

    def let_go(self) -> None:
        """What is not held again until the next call is not held from there on."""
        self._before, self._held = self._held, {}


class _Hold(torch.autograd.Function):
    """What autograd saves is held by the node that saved it, without Python."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.clone()


def _holder(tensor: Tensor) -> Tensor:
    with torch.enable_grad():
        anchor = torch.zeros((), device="cpu", requires_grad=True)
        held: Tensor = _Hold.apply(anchor, tensor)  # type: ignore[no-untyped-call]
    return held
