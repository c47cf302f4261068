"""Numbers for the parts of a tensor make that for the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bytesched.plugins.queries.parts import EXACT_PARTS, Places, Rule, rule_of

INF = float("inf")
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (torch.linalg.vector_norm, ()),
    (torch.linalg.vector_norm, (2.0,)),
    (torch.linalg.vector_norm, (INF,)),
    (torch.linalg.vector_norm, (-INF,)),
    (torch.Tensor.norm, ("fro",)),
    (torch.Tensor.amax, ()),
    (torch.amin, ()),
    (torch.max, ()),
    (torch.Tensor.min, ()),
    (torch.sum, ()),
    (torch.count_nonzero, ()),
    (torch.any, ()),
    (torch.Tensor.all, ()),
]
NAMES = [f"{call.__name__}{args}" for call, args in CALLS]


def places(*parts: int) -> tuple[Places, list[Any]]:
    slots: list[Any] = [object() for _ in parts]
    count = dict(zip(slots, parts, strict=True))
    plan: Any = SimpleNamespace(slots=slots, shares=lambda slot: [None] * count[slot])
    return Places(plan), slots


def combined(call: Any, args: tuple[Any, ...], values: Tensor, cuts: list[int]) -> float:
    parts = torch.tensor_split(values, cuts)
    found, slots = places(1, len(parts), 2)
    numbers = torch.zeros(found.count, dtype=torch.float64)
    for index, part in enumerate(parts):
        numbers[found.of(slots[1], index)] = call(part, *args).double()
    return float(found.combined(numbers, rule_of(call, args, {}, len(parts)))[1])


@pytest.mark.parametrize(("call", "args"), CALLS, ids=NAMES)
@pytest.mark.parametrize("special", [0.0, float("nan"), INF])
def test_of_many_parts_it_is_that_of_the_whole_tensor(
    call: Any, args: tuple[Any, ...], special: float
) -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(5))
    values[77] = special
    expected = float(call(values, *args).double())
    assert combined(call, args, values, [64, 128, 192]) == pytest.approx(
        expected, rel=1e-6, nan_ok=True
    )


@pytest.mark.parametrize(("call", "args"), CALLS, ids=NAMES)
def test_of_two_parts_it_has_the_bits_of_the_whole_tensor_or_is_measured_there(
    call: Any, args: tuple[Any, ...]
) -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(5))
    if rule_of(call, args, {}, EXACT_PARTS) is not Rule.NONE:
        assert combined(call, args, values, [64]) == float(call(values, *args).double())


@pytest.mark.parametrize(
    ("call", "args"),
    [(torch.mean, ()), (torch.linalg.vector_norm, (3.0,)), (torch.norm, (1,))],
    ids=["mean", "norm of 3", "norm of 1"],
)
def test_all_else_is_measured_of_the_whole_tensor(call: Any, args: tuple[Any, ...]) -> None:
    assert rule_of(call, args, {}, 4) is Rule.NONE


def test_a_number_of_a_whole_tensor_stays_as_it_is() -> None:
    found, slots = places(1, 3, 1)
    numbers = torch.zeros(found.count, dtype=torch.float64)
    for value, slot in enumerate(slots, start=1):
        numbers[found.of(slot)] = value
    assert found.combined(numbers, Rule.NONE).tolist() == [1.0, 2.0, 3.0]
