"""Tensors that are made of a gradient before its sum is here: they have the script's own bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.queries.expressions import Asked, derived, expression_of, slots_in
from bytesched.round import GradientState

Made = Callable[[Tensor], Tensor]


class Waited(Exception):
    """A gradient was waited for."""


def wait() -> None:
    raise Waited


def slot_of(values: Tensor, *, with_memory: bool = True) -> Slot:
    """A gradient on the wire that raises `Waited` where it is read."""
    slot = Slot("p", nn.Parameter(torch.zeros(values.shape)))
    slot.view = values.clone()
    slot.make_lazy(wait)
    slot.state = GradientState.TRAVELLING
    slot.use_queries(
        lambda func, args, kwargs: derived(func, args, kwargs, with_memory=with_memory)
    )
    return slot


def values_of(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MAKE: dict[str, Made] = {
    "square": lambda x: x**2,
    "abs": torch.abs,
    "halved": lambda x: x / 2,
    "scaled": lambda x: 0.3 * x,
    "negated": lambda x: -x,
    "double": lambda x: x.double(),
    "root": lambda x: x.abs().sqrt(),
    "product": lambda x: x * x,
}
CHANGE: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda x: x.mul_(0.7),
    "clamp_": lambda x: x.clamp_(-0.5, 0.5),
}


def change_all(change: Callable[[Tensor], object], tensors: list[Tensor]) -> None:
    for tensor in tensors:
        change(tensor)


@given(
    st.lists(
        st.one_of(
            st.sampled_from(sorted(CHANGE)),
            st.lists(st.sampled_from(sorted(MAKE)), min_size=1, max_size=3),
        ),
        max_size=6,
    )
)
def test_what_is_made_between_changes_is_what_a_whole_gradient_gives(script: list[Any]) -> None:
    """Of a gradient that comes when the script is over, by whatever operations."""
    values = values_of(3, 4)
    slot = slot_of(values)
    made, expected = [], []
    for line in script:
        if isinstance(line, str):
            CHANGE[line](values)
            slot.changes.append(partial(change_all, CHANGE[line]))
            continue
        lazy: Tensor = slot.lazy
        plain = values.clone()
        for name in line:
            lazy, plain = MAKE[name](lazy), MAKE[name](plain)
        made.append(lazy)
        expected.append(plain)
    assert not slot.is_read
    slot.change()
    assert torch.equal(slot.view, values)
    for one, other in zip(made, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def test_it_knows_how_it_is_made_of_any_part() -> None:
    slot = slot_of(values_of(4))
    expression = expression_of((slot.lazy / 2) ** 2)
    assert expression is not None
    assert expression.slot is slot
    part = torch.tensor([3.0])
    assert expression.of(part).tolist() == [2.25]
    assert part.tolist() == [3.0]


def text(made: Tensor) -> str:
    expression = expression_of(made)
    assert expression is not None
    return expression.text


def test_the_text_is_that_of_the_operations_alone() -> None:
    """Ranks compare it: of other gradients it is the same, of other operations it is not."""
    one, other = slot_of(values_of(2, 3)).lazy, slot_of(values_of(5)).lazy
    assert text(one) == ""
    texts = [text(make(one)) for make in MAKE.values()]
    assert texts == [text(make(other)) for make in MAKE.values()]
    others = [text(one * 0.5), text(one * 0.25), text((one * 0.5).abs()), text(one.abs() * 0.5)]
    others += [text(one.to(dtype=kind)) for kind in (torch.float64, torch.float16)]
    assert len({*texts, *others, ""}) == len(texts) + len(others) + 1


def test_a_whole_gradient_is_made_of_itself() -> None:
    slot = slot_of(values_of(2, 3))
    for same in (slot.lazy, slot.lazy.detach(), slot.lazy.data, slot.lazy.cpu()):
        expression = expression_of(same)
        assert expression is not None
        assert expression.slot is slot
        assert not expression.text
    flat = expression_of(slot.lazy.view(-1))
    assert flat is not None
    assert flat.text


@pytest.mark.parametrize("state", list(GradientState))
def test_of_what_a_step_has_taken_nothing_is_asked(state: GradientState) -> None:
    slot = slot_of(values_of(3))
    slot.state = state
    taken = {"armed", "due", "applied", "lost"}
    assert (expression_of(slot.lazy) is None) == (state.value in taken)


def test_what_was_read_whole_is_no_expression() -> None:
    """There may be aliases that have changed it out of sight."""
    slot = slot_of(values_of(3))
    square = slot.lazy**2
    slot.is_read = True
    assert expression_of(slot.lazy) is None
    assert expression_of(square) is None


def test_a_change_makes_a_copy_stale_and_not_an_alias() -> None:
    slot = slot_of(values_of(2, 3))
    square, flat = slot.lazy**2, slot.lazy.flatten()
    slot.changes.append(lambda tensors: None)
    assert expression_of(square) is None
    assert expression_of(flat) is not None


def test_a_tensor_of_an_earlier_round_is_no_expression() -> None:
    slot = slot_of(values_of(2, 3))
    before, flat = slot.lazy, slot.lazy.flatten()
    slot.view = slot.view.clone()
    assert expression_of(before) is None
    assert expression_of(flat) is None
    assert expression_of(torch.zeros(3)) is None
    assert expression_of(None) is None


@pytest.mark.parametrize(
    "look",
    [
        lambda slot: slot.lazy + 1,
        lambda slot: slot.lazy * torch.ones(3),
        lambda slot: slot.lazy * slot_of(values_of(3)).lazy,
        lambda slot: slot.lazy.view(3, 1),
        lambda slot: slot.lazy.flatten(0),
        lambda slot: (slot.lazy**2).view(-1),
        lambda slot: torch.mul(slot.lazy, 2.0, out=torch.zeros(3)),
        # It raises what the gradient itself raises, when it is here.
        lambda slot: ~slot.lazy,
    ],
    ids=[
        "unknown",
        "tensor",
        "another",
        "shape",
        "dimension",
        "memory of a copy",
        "out",
        "refused",
    ],
)
def test_all_else_waits(look: Callable[[Slot], object]) -> None:
    with pytest.raises(Waited):
        look(slot_of(values_of(3)))


@pytest.mark.parametrize("state", [GradientState.AWAITED, GradientState.ABSENT, GradientState.FREE])
def test_of_a_gradient_that_does_not_travel_nothing_is_made(state: GradientState) -> None:
    """It would not come in this round."""
    slot = slot_of(values_of(3))
    slot.state = state
    with pytest.raises(Waited):
        _ = slot.lazy**2


def test_of_a_gradient_in_memory_of_its_own_nothing_is_made() -> None:
    slot = slot_of(values_of(3))
    slot.is_apart = True
    with pytest.raises(Waited):
        _ = slot.lazy**2


def test_without_memory_only_what_shares_that_of_the_gradient_is_made() -> None:
    slot = slot_of(values_of(3), with_memory=False)
    assert expression_of(slot.lazy.flatten()) is not None
    with pytest.raises(Waited):
        _ = slot.lazy**2


def test_what_the_script_forgets_is_not_kept() -> None:
    slot = slot_of(values_of(3))
    square = slot.lazy**2
    forgotten = weakref.ref(square)
    del square
    gc.collect()
    assert forgotten() is None
    slot.change()


def test_slots_are_those_of_one_tensor_or_of_several() -> None:
    slots = [slot_of(values_of(3, seed=seed)) for seed in range(3)]
    lazies = [slot.lazy for slot in slots]
    assert list(slots_in([lazies[1], 2.0])) == [slots[1]]
    assert list(slots_in([lazies])) == slots
    assert list(slots_in([tuple(lazies[:2])])) == slots[:2]
    slots[0].is_read = True
    assert list(slots_in([[*lazies, torch.zeros(1)]])) == slots[1:]
    assert not list(slots_in([]))


def asked_of(*elements: int, late_bytes: int = 0) -> tuple[Asked, list[Slot], Any]:
    slots = [slot_of(values_of(n)) for n in elements]
    progress: Any = SimpleNamespace(outstanding_bytes=late_bytes)
    return Asked(slots, progress), slots, progress


def test_most_is_half_of_the_bytes_of_the_round() -> None:
    asked, slots, _ = asked_of(4, 1, 5)
    assert not asked.are_most
    asked.add([slots[0]])
    assert not asked.are_most
    asked.add([slots[0]])
    assert not asked.are_most, "one was counted twice"
    asked.add([slots[1]])
    assert asked.are_most
    asked.clear()
    assert not asked.are_most


def test_gradients_that_are_not_of_the_round_do_not_count() -> None:
    asked, slots, _ = asked_of(2, 8)
    slots[1].state = GradientState.FREE
    asked.add([slots[0]])
    assert asked.are_most


def test_late_is_what_had_not_come_when_the_script_asked_first() -> None:
    asked, slots, progress = asked_of(4, 6, late_bytes=20)
    assert asked.late_share == 0
    asked.add([slots[0]])
    progress.outstanding_bytes = 40
    asked.add([slots[1]])
    assert asked.late_share == 0.5
    asked.clear()
    asked.add([slots[1]])
    assert asked.late_share == 1.0
