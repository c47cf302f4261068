"""Gradients of experts beside plain DistributedDataParallel, without `bytesched.wrap`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..exchanges.peers import peers_of
from .layer import MoE

__all__ = ["data_parallel", "layers", "reduce_expert_gradients"]


def layers(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """DistributedDataParallel over all that is no expert; collective.

    It would give experts the weights of rank 0, and sum gradients of different ones.
    """
    ignored = [
        f"{name}.experts.{rest}"
        for name, layer in layers(model).items()
        for rest, _ in [*layer.experts.named_parameters(), *layer.experts.named_buffers()]
    ]
    # The name that torch's own users of it import; there is no other way.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [name.removeprefix(".") for name in ignored]
    )
    return DistributedDataParallel(model, **options)


def reduce_expert_gradients(model: nn.Module) -> None:
    """Sums gradients of experts over replicas, and divides all, after ``backward()``; collective.

    The division is by the number of all ranks, as DistributedDataParallel divides others: the sum
    over tokens is there once they have been exchanged. `bytesched.wrap` does both itself.

    Raises:
        PeerLost: a rank with the same experts is gone.
        SchedulerTimeout: one does not come within ``BYTESCHED_TIMEOUT_S``.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    for layer in layers(model).values():
        group = layer.experts.data_parallel_group
        # Not on the user's group, which may wait for half an hour.
        peers = peers_of(group) if isinstance(group, dist.ProcessGroup) else None
        for parameter in layer.experts.parameters():
            if parameter.grad is None:
                continue
            parameter.grad /= size
            if peers is not None:
                peers.sum_in_place(parameter.grad, "gradients of experts")
