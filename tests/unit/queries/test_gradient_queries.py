"""What is answered about gradients of which it has the sums, and no rank the whole."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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


def gradients() -> tuple[list[Slot], list[Tensor]]:
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
    progress: Any = SimpleNamespace(wait=at_once, round=Round(slots))
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
        assembled=nowhere,
    )
    queries.begin_round()
    queries.backward_ends()
    for slot in slots:
        slot.lazy.queries, slot.lazy.owner = queries, slot
    return slots, plain


@pytest.mark.parametrize(
    "ask",
    [
        lambda grad: grad.norm(),
        lambda grad: grad.data.norm(2),
        lambda grad: grad.detach().cpu().norm(float("inf")),
        lambda grad: torch.linalg.vector_norm(grad, 3.0),
        lambda grad: grad.sum(),
        lambda grad: torch.amax(grad),
        lambda grad: torch.stack(torch._foreach_norm([grad]))[0],
    ],
)
def test_numbers_are_answered(ask: Callable[[Tensor], Tensor]) -> None:
    slots, plain = gradients()
    for slot, values in zip(slots, plain, strict=True):
        found, expected = ask(slot.lazy), ask(values)
        assert type(found) is Tensor
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
    assert not any(slot.is_read for slot in slots)


@pytest.mark.parametrize(
    "look",
    [
        lambda grad: (grad**2).sum(),
        lambda grad: grad.flatten().norm(),
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


def test_a_change_is_in_every_answer_after_it() -> None:
    slots, (values, *_) = gradients()
    before = slots[0].lazy.norm()
    slots[0].lazy.mul_(0.5)
    assert torch.equal(before, values.norm())
    assert torch.equal(slots[0].lazy.norm(), (values * 0.5).norm())
    slots[0].change()
    assert torch.equal(slots[0].view, values * 0.5)


@pytest.mark.parametrize("state", list(GradientState))
def test_of_what_a_step_has_taken_nothing_is_asked(state: GradientState) -> None:
    slots, _ = gradients()
    slots[0].state = state
    if state.value in {"armed", "due", "applied", "lost"}:
        with pytest.raises(Waited):
            slots[0].lazy.norm()
    else:
        slots[0].lazy.norm()


def test_of_what_was_read_whole_nothing_is_asked() -> None:
    """There may be aliases that have changed it out of sight."""
    slots, _ = gradients()
    slots[0].is_read = True
    with pytest.raises(Waited):
        slots[0].lazy.norm()


def test_of_a_gradient_of_an_earlier_round_nothing_is_asked() -> None:
    slots, _ = gradients()
    slots[0].view = slots[0].view.clone()
    with pytest.raises(Waited):
        slots[0].lazy.norm()
