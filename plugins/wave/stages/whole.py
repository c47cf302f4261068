"""What looks at all gradients of a model of which each rank has one stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...routes.groups.group import Group

#: as in torch.nn.utils.clip_grad_norm_
_SMALL = 1e-6


def clip_grad_norm_(group: Group, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scales the gradients of all ranks to a common norm of at most ``max_norm``; collective.

    Returns the norm before.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    group.wait(group.all_reduce(total), task="the norm of all gradients")
    norm = total.sqrt()
    factor = torch.clamp(max_norm / (norm + _SMALL), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return norm.to(parameters[0].dtype)


def unscale_(group: Group, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Unscales the gradients of this rank, and marks them if any rank has one that is not finite.

    Collective. Without that a scaler would skip the step of one stage, and not of the others.
    """
    scaler.unscale_(optimizer)
    if not scaler.is_enabled():
        return
    # As FSDP's scaler does: nothing public has them.
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    anywhere = torch.stack([torch.zeros(()), *(value.cpu() for value in found.values())]).amax()
    group.wait(group.largest(anywhere), task="whether all gradients are finite")
    found[torch.device("cpu")] = anywhere
