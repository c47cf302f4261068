"""What a script asks of gradients while they are on their way, and does to them before step().

As far as it need not wait for them; with a text for each call that ranks can compare.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Final, TypeAlias

import torch


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
    getattr(torch.Tensor, name) for name in ["clamp_", "clamp_max_", "clamp_min_", "div_", "mul_"]
)
#: The same for several tensors at once.
ELEMENTWISE_OF_ALL: Final[frozenset[Any]] = frozenset(
    getattr(torch, f"_foreach_{name}_") for name in ["clamp_max", "clamp_min", "div", "mul"]
)
UNSCALE: Final[Any] = torch._amp_foreach_non_finite_check_and_unscale_

#: Those that need not wait for whole gradients.
ASKING: Final = NORMS | NORMS_OF_ALL | REDUCTIONS | ELEMENTWISE | ELEMENTWISE_OF_ALL | {UNSCALE}


#: What is made of the numbers for the parts of a tensor, which are rows.
Combine: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
_GREATEST: Final[Combine] = methodcaller("amax", 0)
_LEAST: Final[Combine] = methodcaller("amin", 0)
#: by the name of a reduction
_COMBINED: Final[dict[str, Combine]] = {
    **dict.fromkeys(("amax", "any", "max"), _GREATEST),
    **dict.fromkeys(("all", "amin", "min"), _LEAST),
    **dict.fromkeys(("count_nonzero", "sum"), methodcaller("sum", 0)),
}
#: by the order of a norm
_COMBINED_NORMS: Final[dict[Any, Combine]] = {
    **dict.fromkeys((None, 2, "fro"), lambda parts: parts.square().sum(0).sqrt()),
    float("inf"): _GREATEST,
    float("-inf"): _LEAST,
}

_Change: TypeAlias = Callable[[list[torch.Tensor]], None]
_Measure: TypeAlias = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def are_plain(values: Sequence[Any]) -> bool:
    """Whether they are the same for all tensors: numbers, names, None."""
    return all(
        value is None or isinstance(value, (int, float, str, torch.dtype)) for value in values
    )


def kept(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Numbers, and copies of tensors of one number; None if there is anything else."""
    for value in [*args, *kwargs.values()]:
        is_number = value is None or isinstance(value, (int, float))
        if not is_number and not (type(value) is torch.Tensor and value.dim() == 0):
            return None

    def keep(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return [keep(value) for value in args], {name: keep(v) for name, v in kwargs.items()}


def is_of_whole_tensor(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` makes one number of any tensor, whatever its shape."""
    # 0 is a dimension, and a tensor one to write to.
    named = {n: value for n, value in kwargs.items() if value is not None and value is not False}
    if func in REDUCTIONS:
        return not args and named.keys() <= {"dtype"}
    if len(args) > 1 or not named.keys() <= {"p", "ord", "dtype"}:
        return False
    kind = kind_of_norm(args, kwargs)
    if func is torch.linalg.norm:
        return kind is None
    return kind != "nuc" and are_plain([kind, named.get("dtype")])


def kind_of_norm(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The order of a norm, as it was given; None if it was not."""
    return args[0] if args else kwargs.get("p", kwargs.get("ord"))


def combine_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Combine | None:
    """What makes the number of a tensor of those of its parts; None: nothing does."""
    if func is UNSCALE:
        return _GREATEST
    if func in NORMS | NORMS_OF_ALL:
        return _COMBINED_NORMS.get(kind_of_norm(args, kwargs))
    return _COMBINED.get(getattr(func, "__name__", ""))


def question_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The same text on all ranks for the same call."""
    values = [_number(value) for value in args]
    named = sorted((name, _number(value)) for name, value in kwargs.items())
    return f"{getattr(func, '__name__', func)} {values} {named}"


def _number(value: Any) -> str:
    return repr(value.item() if isinstance(value, torch.Tensor) else value)


def unscaling(found_inf: torch.Tensor, inverse: torch.Tensor) -> tuple[_Change, _Measure]:
    """What `GradScaler` does to gradients, and what it asks of each: whether all is finite."""

    def unscale(tensors: list[torch.Tensor]) -> None:
        UNSCALE(tensors, torch.zeros_like(found_inf), inverse)

    def measure(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for tensor in tensors:
            one = torch.zeros_like(found_inf)
            UNSCALE([tensor.clone()], one, inverse)
            found.append(one.reshape(()))
        return found

    return unscale, measure


def digest(text: str) -> int:
    """A whole number that travels as float64."""
    return zlib.crc32(text.encode())
