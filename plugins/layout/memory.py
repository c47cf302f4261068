"""Whose memory a gradient lies in."""

from __future__ import annotations

from sys import getrefcount

import torch
from torch import nn

from ..proxies.lazy_grads import has_aliases

__all__ = ["is_dense", "is_gradient_shared", "is_laid_out_as", "lies_over", "shaped"]


def is_laid_out_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if both have the same elements at the same places of their memory, in one dtype."""
    if tensor.dtype is not other.dtype or tensor.shape != other.shape:
        return False
    strides, others = tensor.stride(), other.stride()
    return strides == others or all(
        one == another
        for size, one, another in zip(tensor.shape, strides, others, strict=True)
        if size > 1
    )


def lies_over(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """True if ``tensor`` is the very elements of ``memory``; does not wait for a lazy gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.data_ptr() != memory.data_ptr():
            return False
        # Nearly always: no call for those.
        is_alike = tensor.shape == memory.shape and tensor.stride() == memory.stride()
        return (is_alike and tensor.dtype is memory.dtype) or is_laid_out_as(tensor, memory)


def is_gradient_shared(parameter: nn.Parameter) -> bool:
    """True if the script has ``parameter.grad`` under another name, or sees its memory."""
    if getrefcount(parameter.grad) > _REFERENCES:
        return True
    grad = parameter.grad
    # At version 0 the backward pass has just made it.
    return grad is not None and grad._version > 0 and has_aliases(grad)


def _references() -> int:
    """What getrefcount returns for the gradient of a parameter that nothing else refers to."""
    parameter = nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    return getrefcount(parameter.grad)


_REFERENCES = _references()


def shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The memory of ``flat`` in the shape and, if they are dense, the strides of ``parameter``.

    Not a view in autograd's sense: ``p.grad.detach_()`` is refused for those.
    """
    strides = parameter.stride() if is_dense(parameter) else None
    if strides is None:
        strides = torch.empty(parameter.shape, device="meta").stride()
    alias = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return alias.set_(flat.untyped_storage(), flat.storage_offset(), parameter.shape, strides)


def is_dense(tensor: torch.Tensor) -> bool:
    """True if its elements fill their memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
