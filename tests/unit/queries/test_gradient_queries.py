"""What is answered about gradients of which it has the sums, and no rank the whole."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripts_split import BY_HAND
from torch import Tensor, nn

from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.queries.gradient_queries import GradientQueries
from bytesched.round import GradientState, Round

SHAPES = [(3, 4), (5,), (2, 3, 2)]


class Waited(Exception):
    """A gradient was waited for."""


def wait() -> None:
    raise Waited


def at_once(done: Callable[[], bool], what: str, *, until: float = inf) -> None:
    assert done(), what


def nowhere(slots: list[Slot]) -> list[Tensor]:
    raise Waited


class Alone:
    """The answers of no other rank."""

    is_open = True

    def begin_round(self) -> None:
        pass

    def give(self, question: int, signature: int, values: Tensor) -> None:
        pass

    def total(self, question: int, signature: int, own: Tensor) -> Tensor:
        return own

    def is_missing(self, question: int, signature: int) -> bool:
        return False


def gradients(*, come_here: bool = True) -> tuple[list[Slot], list[Tensor]]:
    """Slots whose gradients raise `Waited` when they are read; and plain ones with their values."""
    torch.manual_seed(3)
    plain = [torch.randn(shape) for shape in SHAPES]
    slots = [Slot(f"p{n}", nn.Parameter(torch.zeros(shape))) for n, shape in enumerate(SHAPES)]
    for slot, values in zip(slots, plain, strict=True):
        slot.view = values.clone()
        slot.make_lazy(wait)
        slot.state = GradientState.TRAVELLING
    plan: Any = SimpleNamespace(slots=slots, owner=lambda _: 0, shares=lambda _: [0])
    exchange: Any = SimpleNamespace(is_summed=True)
    progress: Any = SimpleNamespace(wait=at_once, round=Round(slots), outstanding_bytes=0)
    causes = SimpleNamespace(asked=id)
    meter: Any = SimpleNamespace(moment=tuple, waited=lambda *_: None, causes=causes)
    answers: Any = Alone()
    queries = GradientQueries(
        plan,
        0,
        exchange,
        answers,
        progress,
        meter,
        is_whole=lambda: False,
        assembled=None if come_here else nowhere,
        is_told=lambda _: False,
    )
    queries.begin_round()
    queries.backward_ends()
    for slot in slots:
        slot.use_queries(queries)
    return slots, plain


@pytest.mark.parametrize("kinds", [BY_HAND[:7], BY_HAND[7:]], ids=["some", "others"])
def test_numbers_by_hand_are_answered(kinds: list[Callable[[Tensor], Tensor]]) -> None:
    slots, plain = gradients()
    for kind in kinds:
        for slot, values in zip(slots, plain, strict=True):
            found, expected = kind(slot.lazy), kind(values)
            assert type(found) is Tensor
            assert found.dtype is expected.dtype
            assert torch.equal(found, expected)
    assert not any(slot.is_read for slot in slots)


@pytest.mark.parametrize(
    "look",
    [
        lambda grad: (grad**2).sum(0),
        lambda grad: grad.sum(dim=0),
        lambda grad: grad.norm(dim=0),
        lambda grad: torch.amax(grad, dim=0),
        lambda grad: torch.norm(grad, out=torch.zeros(())),
        lambda grad: torch.linalg.vector_norm(grad, out=torch.zeros(())),
        lambda grad: torch.mul(grad, 2.0, out=torch.zeros(3, 4)),
        lambda grad: torch.sum(grad, 0, out=torch.zeros(4)),
        lambda grad: grad.abs().item(),
        lambda grad: (grad * torch.ones(1)).sum(),
        lambda grad: (grad**2).tolist(),
        lambda grad: grad.view(-1, 1).sum(),
    ],
)
def test_all_else_waits(look: Callable[[Tensor], object]) -> None:
    slots, _ = gradients()
    with pytest.raises(Waited):
        look(slots[0].lazy)


def test_what_is_made_of_a_gradient_before_a_change_is_not_that_after_it() -> None:
    slots, (values, *_) = gradients()
    square = slots[0].lazy ** 2
    slots[0].lazy.mul_(0.5)
    after = (slots[0].lazy ** 2).sum()
    assert torch.equal(after, ((values * 0.5) ** 2).sum())
    with pytest.raises(Waited):
        square.sum()
    slots[0].change()
    assert torch.equal(square.sum(), (values**2).sum())


def test_what_shares_memory_with_what_was_made_of_a_gradient_waits() -> None:
    slots, _ = gradients()
    square = slots[0].lazy ** 2
    with pytest.raises(Waited):
        square.view(-1)


def test_where_gradients_stay_with_their_owners_nothing_is_kept_for_later() -> None:
    slots, (values, *_) = gradients(come_here=False)
    assert torch.equal(slots[0].lazy.flatten().norm(), values.flatten().norm())
    with pytest.raises(Waited):
        (slots[0].lazy ** 2).sum()


def test_a_script_that_asks_of_few_gradients_has_not_asked_of_most() -> None:
    slots, _ = gradients()
    queries: Any = slots[0].queries
    assert not queries.asked.are_most
    slots[1].lazy.norm()
    assert not queries.asked.are_most
    slots[0].lazy.norm()
    assert queries.asked.are_most


def test_gradients_that_a_round_does_not_have_do_not_count() -> None:
    slots, _ = gradients()
    slots[0].state = slots[2].state = GradientState.FREE
    queries: Any = slots[0].queries
    slots[1].lazy.norm()
    assert queries.asked.are_most
