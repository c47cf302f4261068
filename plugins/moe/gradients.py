"""A model with experts as a whole: who has them, and gradients, norm and state without wrap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import PluginError

from ..exchanges.peers import peers_of
from .layer import MoE


@dataclass(frozen=True)
class Grid:
    """The two groups of one rank."""

    #: ranks that together hold all experts, each some
    expert_parallel: dist.ProcessGroup
    #: ranks that hold the same experts as this one; None if no other does
    data_parallel: dist.ProcessGroup | None


def expert_groups(expert_ranks: int) -> Grid:
    """The groups of a grid whose rows of ``expert_ranks`` ranks hold all experts; collective.

    Of 4 ranks in rows of 2, ranks 0 and 1 exchange, and so do 2 and 3; 0 and 2 hold the same
    experts, and so do 1 and 3.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    if expert_ranks < 1 or size % expert_ranks:
        raise PluginError(f"{size} ranks cannot be cut into rows of {expert_ranks}")
    rows = [list(range(at, at + expert_ranks)) for at in range(0, size, expert_ranks)]
    columns = [list(range(at, size, expert_ranks)) for at in range(expert_ranks)]
    inside = [dist.new_group(row) for row in rows][rank // expert_ranks]
    outside = None
    if len(rows) > 1:
        outside = [dist.new_group(column) for column in columns][rank % expert_ranks]
    return Grid(inside, outside)


def own_experts(experts: int, group: dist.ProcessGroup | None = None) -> range:
    """Which of ``experts`` this rank holds, where all ranks of ``group`` hold as many."""
    if not dist.is_available() or not dist.is_initialized():
        return range(experts)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if experts % size:
        raise PluginError(f"{experts} experts cannot be spread evenly over {size} ranks")
    each = experts // size
    return range(rank * each, (rank + 1) * each)


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


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The ``state_dict()`` of one process that has all experts, on every rank; collective.

    ``load_state_dict`` of the model takes it on any number of ranks. For large models, save each
    rank's ``state_dict()`` in a file of its own instead: it loads on as many ranks, and the union
    of all files is this dictionary. States of optimizers belong to ranks; save each rank's own.
    """
    state = dict(model.state_dict())
    for name, layer in layers(model).items():
        if layer.numbers == range(layer.gate.experts):
            continue
        start = f"{name}.experts." if name else "experts."
        own = {key: state.pop(key) for key in list(state) if key.startswith(start)}
        peers = peers_of(layer.group)
        assert peers is not None
        state.update(peers.share(own, f"experts of {name or 'the layer'}"))
    return state
