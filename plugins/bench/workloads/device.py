"""Emulated devices: layers that take the time of a profile on a device of which there is one.

A layer sleeps for as long as the profile says for the samples that it is given, and yields
activations and gradients of the profile's size. The foreground and a background step never
compute on one device at the same time: whoever comes second waits, as on a device that does not
interrupt what it has begun.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

from bytesched.burst.graph import Chain, Layer

from ...burst.branched import Branched
from .emulated import Pace

__all__ = ["Device", "emulated_model"]

ELEMENT_BYTES = 4


class Device:
    """The one device of a rank."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pace = Pace()

    def run_background(self, duration_s: float) -> None:
        """A background step of this length."""
        with self.lock:
            time.sleep(duration_s)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer, device: Device) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.device = layer, device
        with device.lock:
            device.pace.start()
            values = torch.tanh(x.mean(1, keepdim=True) + weight[:1])
            y = values.expand(-1, _elements(layer)).contiguous()
            device.pace.finish(layer.forward.ns(len(x)) / 1e9)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        with ctx.device.lock:
            ctx.device.pace.start()
            mean = grad.mean(1, keepdim=True)
            grad_x = mean.expand(x.shape).contiguous()
            grad_weight = weight * mean.sum()
            ctx.device.pace.finish(ctx.layer.backward.ns(len(x)) / 1e9)
        return grad_x, grad_weight, None, None


class _EmulatedLayer(nn.Module):
    def __init__(self, layer: Layer, device: Device) -> None:
        super().__init__()
        self._layer = layer
        # Not copied with the module: there is one device.
        self._device = (device,)
        elements = max(1, layer.parameter_bytes // ELEMENT_BYTES)
        self.weight = nn.Parameter(torch.full((elements,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return x.new_empty((len(x), _elements(self._layer)))
        y: Tensor = _Compute.apply(x, self.weight, self._layer, self._device[0])  # type: ignore[no-untyped-call]
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> _EmulatedLayer:
        return _EmulatedLayer(self._layer, self._device[0])


def emulated_model(chain: Chain, device: Device) -> nn.Sequential:
    """A model that takes the time of a chain on this rank's device."""
    items: list[nn.Module] = []
    for item in chain:
        if isinstance(item, Layer):
            items.append(_EmulatedLayer(item, device))
        else:
            branches = (emulated_model(branch, device) for branch in item.branches)
            items.append(Branched(*branches, join="concat"))
    return nn.Sequential(*items)


def _elements(layer: Layer) -> int:
    return max(1, layer.output_bytes // ELEMENT_BYTES)
