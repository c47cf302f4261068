"""Values as MPI takes them: flat, in the host's memory."""

from __future__ import annotations

from typing import Any

import torch

from bytesched.errors import PluginError

__all__ = ["flat_of", "memory_of", "packed_state", "tensor_of", "unpacked_state"]


def tensor_of(value: Any) -> torch.Tensor:
    """The memory of a torch tensor or a numpy array."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        return torch.from_numpy(value)
    except TypeError as error:
        raise PluginError(f"a value of type {type(value).__qualname__}: {error}") from None


def flat_of(value: Any) -> torch.Tensor:
    """Its elements one after another in the host's memory: its own memory, if they lie so."""
    return tensor_of(value).cpu().contiguous().reshape(-1)


def memory_of(tensor: torch.Tensor) -> Any:
    """The bytes of a flat tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def packed_state(state: dict[str, torch.Tensor]) -> tuple[list[list[Any]], torch.Tensor]:
    """What the entries are, as JSON takes it, and their bytes one after the other."""
    what = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in state.items()]
    data = [t.contiguous().reshape(-1).view(torch.uint8) for t in state.values() if t.numel()]
    return what, torch.cat(data) if data else torch.empty(0, dtype=torch.uint8)


def unpacked_state(what: list[list[Any]], data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The entries again."""
    state, offset = {}, 0
    for name, dtype_name, shape in what:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
        raw = tensor.reshape(-1).view(torch.uint8)
        raw.copy_(data[offset : offset + raw.numel()])
        offset += raw.numel()
        state[name] = tensor
    return state
