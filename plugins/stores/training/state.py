"""Optimizer state between a checkpoint, which has it by parameter, and a store, by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bytesched.errors import PluginError
from bytesched.kvstore.pipes import Chunk

from ...layout.plan import Plan
from ...layout.slots import Slot
from ...update.frozen import snapshot

__all__ = [
    "gathered_state",
    "hyperparameters_of",
    "numbered_state",
    "scatter_state",
    "send_values",
]


def gathered_state(
    store: Any, plan: Plan, chunks: Sequence[Chunk]
) -> dict[Slot, dict[str, torch.Tensor]]:
    """The store's state of every parameter, as torch.optim has it."""
    entries: dict[Slot, dict[str, torch.Tensor]] = {slot: {} for slot in plan.slots}
    for chunk in chunks:
        index = chunk.push_task.index
        size = plan.buffers[index].numel()
        state = store.get_state(chunk.key)
        del state["value"]
        start_at = 0
        for slice_ in plan.slices[index]:
            count = slice_.stop_at - slice_.start_at
            entry = entries[slice_.slot]
            for name, tensor in state.items():
                if tensor.numel() != size or tensor.dim() == 0:
                    entry[name] = tensor.clone()
                    continue
                if name not in entry:
                    entry[name] = torch.empty_like(slice_.slot.view, dtype=tensor.dtype)
                flat = _flat(entry[name])
                flat[slice_.start_at : slice_.stop_at] = tensor[start_at : start_at + count]
            start_at += count
    return entries


def scatter_state(
    store: Any, plan: Plan, chunks: Sequence[Chunk], state: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Gives the store the state, and the values, of worker 0; collective."""
    for chunk in chunks:
        slices = plan.slices[chunk.push_task.index]
        entries: dict[str, torch.Tensor] = {"value": _value(plan, chunk)}
        for name, first in state.get(slices[0].slot.parameter, {}).items():
            slot = slices[0].slot
            first = torch.as_tensor(first)
            if first.dim() == 0 or first.numel() != slot.view.numel():
                entries[name] = first
                continue
            parts = []
            for slice_ in slices:
                same = torch.empty_like(slice_.slot.view, dtype=first.dtype)
                same.copy_(torch.as_tensor(state[slice_.slot.parameter][name]))
                parts.append(_flat(same)[slice_.start_at : slice_.stop_at])
            entries[name] = torch.cat(parts)
        store.set_state(chunk.key, entries)


def send_values(store: Any, plan: Plan, chunks: Sequence[Chunk]) -> None:
    """Gives the store the parameters of worker 0, which were changed there; collective."""
    for chunk in chunks:
        store.set_state(chunk.key, {"value": _value(plan, chunk)})


def _value(plan: Plan, chunk: Chunk) -> torch.Tensor:
    """The parameters in a chunk, in the order of its memory."""
    parts = []
    for slice_ in plan.slices[chunk.push_task.index]:
        same = torch.empty_like(slice_.slot.view).copy_(slice_.slot.parameter.detach())
        parts.append(_flat(same)[slice_.start_at : slice_.stop_at])
    return torch.cat(parts)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def numbered_state(
    optimizer: torch.optim.Optimizer, entries: dict[Slot, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """``entries`` by the numbers of their parameters, as a state dict has them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_parameter = {id(slot.parameter): entry for slot, entry in entries.items()}
    return {
        number: by_parameter[id(parameter)]
        for number, parameter in enumerate(parameters)
        if by_parameter.get(id(parameter))
    }


def hyperparameters_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Those of all parameters; PluginError if its groups differ."""
    groups = [snapshot(group) for group in optimizer.param_groups]
    if any(group != groups[0] for group in groups):
        raise PluginError(
            "parameter groups with different settings: a store that updates has one for all"
        )
    # What a learning-rate scheduler keeps in the group is its own.
    return {key: _as_json(value) for key, value in groups[0].items() if key != "initial_lr"}


def _as_json(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
