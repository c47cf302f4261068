"""The norm of all gradients, in which each expert counts once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..exchanges.peers import peers_of
from .gradients import layers

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales gradients to a norm of at most ``max_norm``; returns the norm before; collective.

    As torch's function for one process that has all experts. To be called when all gradients are
    reduced. Replicas of an expert count as one, and all ranks get the same bits.
    """
    shared = dict.fromkeys(model.parameters())
    squares = []
    for layer in layers(model).values():
        own = list(layer.experts.parameters())
        for parameter in own:
            shared.pop(parameter, None)
        mine = _square(own)
        if layer.numbers != range(layer.gate.experts):
            mine = _summed(mine, layer.group)
        squares.append(mine)
    norm = torch.stack([_square(shared), *squares]).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device, parameter.grad.dtype))
    return norm


def _summed(square: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Those of all ranks, in their order: with the limit, and the names, of an exchange."""
    peers = peers_of(group)
    assert peers is not None
    bits = [int(square.view(torch.int64))]
    rows = peers.gather_numbers(bits, square.device, is_urgent=False)
    numbers = torch.tensor(rows, dtype=torch.int64, device=square.device)
    return numbers.view(torch.float64).sum()


def _square(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The sum of squares of gradients, in float64."""
    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
