"""Emulated compute: a model that sleeps for the times of a profile and yields gradients.

Stands for an accelerator beside which the host is free: the time is emulated, the parameters,
gradients and their traffic are real. Gradients have real size, depend on the weights and on the
input, and are the same in every run, so that a stale weight anywhere shows in the loss.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from bytesched.bench.profile import LayerProfile, Profile

from .experts import Exchanges

WIDTH = 16


class Pace:
    """Sleeps such that the compute of a chain of layers takes as long as it should in sum.

    A sleep ends late, and work between two sleeps takes time as well; the next sleep is that much
    shorter. Time in which the thread was blocked elsewhere, waiting for a gradient, is no part of
    the compute: an accelerator would have caught up meanwhile, so lateness is forgotten there.
    """

    def __init__(self) -> None:
        self._late_s = 0.0
        self._start_s = 0.0
        self._end_s = time.perf_counter()
        self._end_cpu_s = time.thread_time()

    def start(self) -> None:
        """A layer begins to compute."""
        self._start_s = time.perf_counter()
        busy_s = time.thread_time() - self._end_cpu_s
        blocked_s = max(0.0, self._start_s - self._end_s - busy_s)
        self._late_s = max(0.0, self._late_s - blocked_s)

    def finish(self, duration_s: float) -> None:
        """Return when the layer that began last has computed for so long."""
        due_s = self._start_s + duration_s - self._late_s
        left_s = due_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        self._end_s = time.perf_counter()
        self._end_cpu_s = time.thread_time()
        self._late_s = max(0.0, self._end_s - due_s)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: EmulatedLayer, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        if layer.has_experts:
            return layer.through(x, layer.forward_s)
        layer.pace.start()
        y = x.clone()
        for parameter in parameters:
            y += 0.1 * torch.sin(y + parameter.reshape(-1)[:WIDTH].sum())
        ctx.save_for_backward(y, *parameters)
        layer.pace.finish(layer.forward_s)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layer, (grad,) = ctx.layer, grads
        if layer.has_experts:
            return layer.through(grad, layer.backward_s), None
        layer.pace.start()
        y, *parameters = ctx.saved_tensors
        scale = (grad * torch.cos(y)).mean()
        found = [torch.mul(parameter, scale) for parameter in parameters]
        layer.pace.finish(layer.backward_s)
        return grad, None, *found


class EmulatedLayer(nn.Module):
    """A layer that computes for the times of its profile.

    One of experts has no gradients to send: `exchanges` carries what they get. Without, it computes
    alone.
    """

    def __init__(self, profile: LayerProfile, pace: Pace) -> None:
        super().__init__()
        self.pace = pace
        self.forward_s = profile.forward_ms / 1e3
        self.backward_s = profile.backward_ms / 1e3
        self.exchanges: Exchanges | None = None
        self._exchanged_bytes = profile.exchange_bytes
        for index, shape in enumerate(profile.shapes):
            weight = nn.Parameter(torch.empty(shape).uniform_(-0.1, 0.1))
            self.register_parameter(f"weight{index}", weight)

    @property
    def has_experts(self) -> bool:
        """Whether what it reads comes from all ranks, and goes back to them."""
        return self._exchanged_bytes > 0

    def forward(self, x: Tensor) -> Tensor:
        """Values of the same shape that depend on every parameter, or those of all ranks."""
        y: Tensor = _Compute.apply(x, self, *self.parameters(recurse=False))  # type: ignore[no-untyped-call]
        return y

    def through(self, x: Tensor, duration_s: float) -> Tensor:
        """One direction of experts: what is to be exchanged, computed and exchanged again."""

        def compute(share: float) -> None:
            self.pace.start()
            self.pace.finish(share * duration_s)

        if self.exchanges is not None:
            return self.exchanges.through(x, self._exchanged_bytes, compute)
        compute(1.0)
        return x.clone()


class EmulatedModel(nn.Sequential):
    """The layers of a profile, one after another, at a pace of their own."""

    def __init__(self, profile: Profile) -> None:
        pace = Pace()
        super().__init__(*(EmulatedLayer(layer, pace) for layer in profile.layers))


def emulated_loss(model: nn.Module, seed: int) -> Tensor:
    """A loss that depends on the seed's input and on every weight."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(WIDTH, generator=generator, requires_grad=True)
    loss: Tensor = model(x).square().mean()
    return loss
