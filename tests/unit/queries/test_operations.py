"""The tables of operations: each does what its table says of it, on the whole and on a part."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from bytesched.plugins.queries.operations import (
    ASKING,
    ELEMENTWISE,
    ELEMENTWISE_OF_ALL,
    NORMS,
    NORMS_OF_ALL,
    REDUCTIONS,
    UNSCALE,
)

#: what is given beside the tensor, for those that need it
GIVEN: dict[str, tuple[Any, ...]] = {
    "clamp_": (0.2, 0.5),
    "clamp_max_": (0.5,),
    "clamp_min_": (0.5,),
    "div_": (3.0,),
    "mul_": (0.7,),
}


def named(functions: frozenset[Any]) -> list[Any]:
    """As parameters, in one order, with names that tell methods from functions."""
    names = {function: f"{_owner(function)}.{function.__name__}" for function in functions}
    return [
        pytest.param(function, id=name)
        for function, name in sorted(names.items(), key=lambda item: item[1])
    ]


def _owner(function: Any) -> str:
    is_method = getattr(torch.Tensor, function.__name__, None) is function
    return "Tensor" if is_method else "torch"


def values() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).abs() + 0.1


def test_no_operation_is_in_two_tables() -> None:
    tables = [NORMS, NORMS_OF_ALL, REDUCTIONS, ELEMENTWISE, ELEMENTWISE_OF_ALL]
    for one, other in combinations([*tables, frozenset({UNSCALE})], 2):
        assert not one & other


def test_what_need_not_wait_is_asking() -> None:
    assert {torch.Tensor.norm, torch._foreach_mul_, torch.sum, UNSCALE} <= ASKING


def test_a_function_is_known_with_its_method() -> None:
    """A script may write either."""
    for name in {function.__name__ for function in REDUCTIONS}:
        for owner in (torch, torch.Tensor):
            assert getattr(owner, name) in REDUCTIONS, (owner, name)


@pytest.mark.parametrize("function", named(ELEMENTWISE))
def test_a_change_of_a_part_is_the_part_of_the_change(function: Any) -> None:
    given = GIVEN[function.__name__]
    whole = values()
    before = whole.clone()
    parts = [part.clone() for part in whole.flatten().split(5)]
    assert function(whole, *given) is whole
    for part in parts:
        function(part, *given)
    assert torch.equal(whole.flatten(), torch.cat(parts))
    assert not torch.equal(whole, before)


@pytest.mark.parametrize("function", named(ELEMENTWISE_OF_ALL))
def test_a_change_of_all_is_that_of_each(function: Any) -> None:
    name = function.__name__.removeprefix("_foreach_")
    given = GIVEN[name]
    tensors = [values(), values() * 2]
    expected = [getattr(tensor.clone(), name)(*given) for tensor in tensors]
    function(tensors, *given)
    assert all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize("function", named(NORMS | REDUCTIONS))
def test_of_the_tensor_alone_it_is_one_number(function: Any) -> None:
    assert function(values()).shape == ()
