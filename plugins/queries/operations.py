"""What scripts do with gradients between backward and step, as far as it need not wait for them."""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = [
    "ASKING",
    "ELEMENTWISE",
    "ELEMENTWISE_OF_ALL",
    "NORMS",
    "NORMS_OF_ALL",
    "REDUCTIONS",
    "UNSCALE",
]


def _both(*names: str) -> frozenset[Any]:
    """The methods of a tensor and the functions of these names."""
    return frozenset(
        function
        for name in names
        for owner in (torch.Tensor, torch)
        if (function := getattr(owner, name, None)) is not None
    )


#: Norms of one tensor.
NORMS: Final[frozenset[Any]] = frozenset(
    {torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.norm}
)
#: The same of several tensors at once.
NORMS_OF_ALL: Final[frozenset[Any]] = frozenset({torch._foreach_norm})
#: Other reductions to one number, where nothing but the tensor is given.
REDUCTIONS: Final = _both(
    "all", "amax", "amin", "any", "count_nonzero", "max", "mean", "min", "sum"
)

#: What is done in place to each element by itself, with numbers.
ELEMENTWISE: Final[frozenset[Any]] = frozenset(
    {
        torch.Tensor.clamp_,
        torch.Tensor.clamp_max_,
        torch.Tensor.clamp_min_,
        torch.Tensor.div_,
        torch.Tensor.mul_,
    }
)
#: The same for several tensors at once.
ELEMENTWISE_OF_ALL: Final[frozenset[Any]] = frozenset(
    {
        torch._foreach_clamp_max_,
        torch._foreach_clamp_min_,
        torch._foreach_div_,
        torch._foreach_mul_,
    }
)
UNSCALE: Final[Any] = torch._amp_foreach_non_finite_check_and_unscale_

#: Those that need not wait for whole gradients.
ASKING: Final = NORMS | NORMS_OF_ALL | REDUCTIONS | ELEMENTWISE | ELEMENTWISE_OF_ALL | {UNSCALE}
