"""What scripts do with gradients between backward and step, as far as it need not wait for them."""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = [
    "ALIASES",
    "ASKING",
    "ELEMENTWISE",
    "ELEMENTWISE_OF_ALL",
    "NORMS",
    "NORMS_OF_ALL",
    "PURE",
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

#: The same memory as another tensor.
ALIASES: Final[frozenset[Any]] = frozenset(
    {torch.Tensor.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
)
#: The same elements in another shape, where -1 or nothing is given.
FLATTENING: Final = _both("flatten", "ravel", "reshape", "view")
#: A tensor that is made of one, element by element.
PURE: Final = (
    FLATTENING
    | _both(
        "abs",
        "absolute",
        "div",
        "divide",
        "isfinite",
        "isinf",
        "isnan",
        "logical_not",
        "mul",
        "multiply",
    )
    | _both("neg", "pow", "sqrt", "square", "true_divide")
    | _both("__abs__", "__invert__", "__mul__", "__neg__", "__pow__", "__rmul__", "__truediv__")
    | frozenset(
        {
            torch.Tensor.bfloat16,
            torch.Tensor.contiguous,
            torch.Tensor.double,
            torch.Tensor.float,
            torch.Tensor.half,
            torch.Tensor.to,
        }
    )
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

#: A carrier that splits answers these, or notes them down.
ASKING: Final = NORMS | NORMS_OF_ALL | REDUCTIONS | ELEMENTWISE | ELEMENTWISE_OF_ALL | {UNSCALE}
