"""Where the elements of tensors lie in memory, and what stands for their values."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

import torch


def shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The memory of ``flat`` in the shape and, if they are dense, the strides of ``parameter``.

    Not a view in autograd's sense: ``p.grad.detach_()`` is refused for those.
    """
    like = parameter if is_dense(parameter) else torch.empty(parameter.shape, device="meta")
    alias = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return alias.set_(flat.untyped_storage(), flat.storage_offset(), parameter.shape, like.stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """True if its elements fill their memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def elements(tensor: torch.Tensor, like: torch.Tensor, start_at: int, stop_at: int) -> torch.Tensor:
    """Elements of ``tensor``, in the order that they have in memory in ``like``.

    ``like`` has the same shape and is dense. A view where strides are equal.
    """
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((stop_at - start_at,), (1,), tensor.storage_offset() + start_at)


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """What is the same, with all likelihood, only for the same values in the same order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        # Not through numpy, which need not be there.
        values = tensor.detach().cpu().contiguous()
        digest.update(ctypes.string_at(values.data_ptr(), values.nbytes))
    return digest.hexdigest()
