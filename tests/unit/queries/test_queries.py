"""What need not wait for gradients, and texts of calls: the same for what is the same."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytesched.plugins.queries import (
    ASKING,
    ELEMENTWISE,
    ELEMENTWISE_OF_ALL,
    NORMS,
    NORMS_OF_ALL,
    REDUCTIONS,
    UNSCALE,
    are_plain,
    digest,
    is_of_whole_tensor,
    kept,
    kind_of_norm,
    question_of,
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


NORM, SUM, LINALG, VECTOR = (
    torch.Tensor.norm,
    torch.sum,
    torch.linalg.norm,
    torch.linalg.vector_norm,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], True),
        ([None, 1, 2.0, True, "fro", torch.float64], True),
        ([torch.zeros(())], False),
        ([[1]], False),
    ],
)
def test_plain_is_what_is_the_same_for_every_tensor(values: list[Any], expected: bool) -> None:
    assert are_plain(values) is expected


def test_a_tensor_of_one_number_is_kept_as_it_is_now() -> None:
    scale = torch.tensor(0.5)
    found = kept([scale, 2], {"value": scale, "none": None})
    assert found is not None
    (copy, two), named = found
    scale.fill_(9.0)
    assert [float(copy), two, float(named["value"]), named["none"]] == [0.5, 2, 0.5, None]


@pytest.mark.parametrize(
    "value",
    [torch.zeros(1), torch.nn.Parameter(torch.zeros(())), "fro", [1.0], torch.float32],
    ids=["one element", "parameter", "text", "list", "dtype"],
)
def test_all_else_is_not_kept(value: Any) -> None:
    assert kept([value], {}) is None
    assert kept([1.0], {"value": value}) is None


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (SUM, (), {}, True),
        (SUM, (), {"dtype": torch.float64}, True),
        (SUM, (), {"dim": None, "keepdim": False}, True),
        (SUM, (0,), {}, False),
        (SUM, (), {"dim": 0}, False),
        (SUM, (), {"out": torch.zeros(())}, False),
        (torch.max, (torch.zeros(3),), {}, False),
        (NORM, (), {}, True),
        (NORM, (2,), {}, True),
        (NORM, (), {"p": "fro"}, True),
        (NORM, ("nuc",), {}, False),
        (NORM, (2, 0), {}, False),
        (NORM, (), {"dim": 0}, False),
        (NORM, (), {"keepdim": True}, False),
        (VECTOR, (), {"ord": 3, "dtype": torch.float64}, True),
        (VECTOR, (torch.tensor(2.0),), {}, False),
        # A norm of a matrix, where a vector has another.
        (LINALG, (), {}, True),
        (LINALG, (2,), {}, False),
        (LINALG, (), {"ord": "fro"}, False),
    ],
)
def test_what_makes_one_number_of_a_tensor_of_any_shape(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool
) -> None:
    assert is_of_whole_tensor(func, args, kwargs) is expected


def test_the_kind_of_a_norm_is_what_was_given() -> None:
    assert kind_of_norm((3,), {}) == 3
    assert kind_of_norm((), {"p": "fro"}) == "fro"
    assert kind_of_norm((), {"ord": 1}) == 1
    assert kind_of_norm((), {}) is None


def test_names_may_come_in_any_order_and_numbers_in_tensors() -> None:
    assert question_of(NORM, (), {"p": 2, "dtype": None}) == question_of(
        NORM, (), {"dtype": None, "p": 2}
    )
    assert question_of(NORM, (torch.tensor(2.0),), {}) == question_of(NORM, (2.0,), {})


NUMBERS = st.none() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.sampled_from(["fro"])
CALLS = st.tuples(
    st.sampled_from([NORM, SUM, torch.Tensor.mul_]),
    st.lists(NUMBERS, max_size=2),
    st.dictionaries(st.sampled_from(["p", "ord", "dtype"]), NUMBERS, max_size=2),
)


@given(CALLS, CALLS)
def test_calls_that_differ_have_other_texts(one: Any, other: Any) -> None:
    # As texts: 1 and 1.0 are equal, and make tensors of other dtypes.
    is_same = one[0] is other[0] and repr((one[1], sorted(one[2].items()))) == repr(
        (other[1], sorted(other[2].items()))
    )
    assert (question_of(*one) == question_of(*other)) is is_same


@given(st.text())
def test_a_digest_travels_as_a_float(text: str) -> None:
    number = digest(text)
    assert number == digest(text)
    assert int(torch.tensor([number], dtype=torch.float64)) == number


def test_digests_of_other_texts_are_others() -> None:
    assert len({digest(f"norm [{number}] []") for number in range(1000)}) == 1000
