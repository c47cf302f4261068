"""Emulated stages of a pipeline: they wait for each part of their work where it is done.

A backward is two nodes of autograd's graph: one on the way to the stage's input, one on the way to
its weights. So a schedule that computes weight gradients apart (I and W, Qi et al., ICLR 2024) has
each wait where it computes, and one that does not has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .emulated import WIDTH, Pace

__all__ = ["EmulatedStage"]


class _OfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace, input_gradient_s: float) -> Tensor:
        ctx.pace, ctx.input_gradient_s = pace, input_gradient_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.pace.start()
        ctx.pace.finish(ctx.input_gradient_s)
        return grads[0], None, None


class _OfWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pace: Pace, forward_s: float, weight_gradient_s: float, *parameters: Tensor
    ) -> Tensor:
        pace.start()
        value = torch.zeros(())
        for parameter in parameters:
            value = value + 0.1 * torch.sin(parameter.reshape(-1)[:WIDTH].sum())
        ctx.save_for_backward(*parameters)
        ctx.pace, ctx.weight_gradient_s = pace, weight_gradient_s
        pace.finish(forward_s)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.pace.start()
        found = [torch.mul(parameter, grads[0]) for parameter in ctx.saved_tensors]
        ctx.pace.finish(ctx.weight_gradient_s)
        return None, None, None, *found


class EmulatedStage(nn.Module):
    """A stage whose micro-batches take the given seconds, and whose gradients are of real size.

    One whose input needs no gradient, the first, has both halves of its backward where its weights
    are: inside a stage, gradients travel from layer to layer nevertheless.

    Args:
        shapes: of its parameters.
        times_s: of a forward, of the gradient of the input, and of those of the weights.
        seed: of its weights.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        times_s: tuple[float, float, float],
        pace: Pace,
        seed: int,
    ) -> None:
        super().__init__()
        self._pace = pace
        self._times_s = times_s
        generator = torch.Generator().manual_seed(seed)
        for index, shape in enumerate(shapes):
            weight = torch.empty(tuple(shape)).uniform_(-0.1, 0.1, generator=generator)
            self.register_parameter(f"weight{index}", nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        """Values of the same shape that depend on every parameter."""
        forward_s, input_gradient_s, weight_gradient_s = self._times_s
        if x.requires_grad:
            x = _OfInput.apply(x, self._pace, input_gradient_s)  # type: ignore[no-untyped-call]
        else:
            weight_gradient_s += input_gradient_s
        parameters = self.parameters(recurse=False)
        value = _OfWeights.apply(  # type: ignore[no-untyped-call]
            self._pace, forward_s, weight_gradient_s, *parameters
        )
        y: Tensor = x + value
        return y
