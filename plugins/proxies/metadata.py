"""What may be asked of a tensor that waits without waiting for it, and where tensors are found."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["METADATA", "tensors_in"]

#: property -> what may be done to it
_PROPERTIES = {
    "_backward_hooks": "__get__ __set__",
    "_post_accumulate_grad_hooks": "__get__ __set__",
    "_version": "__get__",
    "device": "__get__",
    "dtype": "__get__",
    "grad": "__get__ __set__ __delete__",
    "grad_fn": "__get__",
    "is_cpu": "__get__",
    "is_cuda": "__get__",
    "is_leaf": "__get__",
    "is_sparse": "__get__",
    "layout": "__get__",
    "names": "__get__",
    "ndim": "__get__",
    "output_nr": "__get__",
    "requires_grad": "__get__ __set__",
    "shape": "__get__",
}

#: Reads that say nothing about the values. They must not wait: ``zero_grad()`` reads ``p.grad``,
#: and waiting there would bring the barrier back without any test of values noticing.
METADATA: frozenset[Any] = frozenset(
    getattr(getattr(torch.Tensor, name), access)
    for name, accesses in _PROPERTIES.items()
    for access in accesses.split()
    if hasattr(torch.Tensor, name)
) | frozenset(
    {
        torch.Tensor.__len__,
        torch.Tensor.dim,
        torch.Tensor.element_size,
        torch.Tensor.is_complex,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.Tensor.nelement,
        torch.Tensor.numel,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.requires_grad_,
        torch.Tensor.size,
        torch.Tensor.stride,
    }
)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors among ``value``, which may be nested."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            # Most lists have nothing else: no call for each of them.
            if isinstance(item, torch.Tensor):
                found.append(item)
            else:
                found += tensors_in(item)
    return found
