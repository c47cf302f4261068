"""Values as MPI takes them: flat, in one piece of the host's memory."""

from __future__ import annotations

from typing import Any

import torch

from bytesched.errors import PluginError

__all__ = ["flat_of", "memory_of", "tensor_of"]


def tensor_of(value: Any) -> torch.Tensor:
    """The memory of a torch tensor or a numpy array."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        return torch.from_numpy(value)
    except TypeError as error:
        raise PluginError(f"a value of type {type(value).__qualname__}: {error}") from None


def flat_of(value: Any) -> torch.Tensor:
    """Its elements in one piece of the host's memory: its own, if they are."""
    return tensor_of(value).cpu().contiguous().reshape(-1)


def memory_of(tensor: torch.Tensor) -> Any:
    """The bytes of a flat tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
