"""What was noted about gradients, done when they are here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bytesched.plugins.layout.slots import Slot, change


def made() -> Slot:
    slot = Slot("w", nn.Parameter(torch.zeros(2)))
    slot.lay_out(torch.ones(2))
    return slot


def halve(views: list[Tensor]) -> None:
    torch._foreach_mul_(views, 0.5)


def test_a_change_is_made_once_of_a_parameter_that_is_named_twice() -> None:
    slot = made()
    slot.changes = [halve]
    change([slot, slot])
    change([slot])
    assert slot.view.tolist() == [0.5, 0.5]


def test_gradients_with_the_same_changes_are_changed_in_one_call() -> None:
    counts = []

    def count(views: list[Tensor]) -> None:
        counts.append(len(views))

    one, other, apart = made(), made(), made()
    one.changes, other.changes, apart.changes = [count, halve], [count, halve], [halve]
    change([one, apart, other])
    assert counts == [2]
    assert all(slot.view.tolist() == [0.5, 0.5] for slot in (one, other, apart))
