"""Gradients that a script reduces itself: what counts as all of them, and when that is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from laid_out import parameters

from bytesched.plugins.engine import by_hand
from bytesched.plugins.engine.by_hand import ByHand
from bytesched.values import size_text

#: process groups: of the ranks that have averaged gradients, and of others
SAME, OTHERS = object(), object()
#: elements of the two parameters
FIRST, SECOND = 60, 40
ALL = FIRST + SECOND


class Script:
    """What a script does between two passes, and who looks at it."""

    def __init__(self) -> None:
        self.watches: list[Callable[[Any, int], None]] = []
        self.parameters = parameters((FIRST,), (SECOND,))
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        #: those whose gradient the script may have a copy of
        self.read = {id(parameter) for parameter in self.parameters}

    def watch(self, watch: Callable[[Any, int], None]) -> Callable[[], None]:
        """In place of `entries.watch_reductions`: no process group is needed."""
        self.watches.append(watch)
        return self.watches.clear

    def watched(self, *, speaks: bool = True) -> ByHand:
        return ByHand(
            self.parameters,
            lambda parameter: id(parameter) in self.read,
            lambda group: group is SAME,
            speaks=speaks,
        )

    def reduces(self, elements: int, group: object = SAME) -> None:
        for watch in self.watches:
            watch(group, elements)

    def steps(self, by_hand: ByHand, reduced: Sequence[int]) -> list[bool]:
        """A step for each number of elements that are reduced in front of it."""
        over = []
        for elements in reduced:
            by_hand.backward_ends()
            self.reduces(elements)
            over.append(by_hand.step_begins())
        return over


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(by_hand, "watch_reductions", script.watch)
    return script


def test_the_second_step_that_does_so_is_told_with_the_line_and_the_size(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    assert script.steps(script.watched(), [ALL, ALL]) == [False, True]
    (said,) = caplog.messages
    assert "the script reduces all gradients itself between backward() and step()" in said
    assert "(a process group, test_by_hand.py:" in said
    assert f"in every iteration {size_text(4 * ALL)} are sent twice, and waited for" in said
    assert "Remove the script's own reduction and its division by the number of ranks" in said
    assert not script.watches, "nothing is looked at any more"


def test_the_other_ranks_look_as_long_and_say_nothing(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    assert script.steps(script.watched(speaks=False), [ALL, ALL]) == [False, True]
    assert not script.watches
    assert not caplog.messages


@pytest.mark.parametrize(
    ("reduced", "over", "said"),
    [
        ([ALL, 0, ALL], [False, False, True], True),
        ([0, ALL, ALL], [False, False, True], True),
        ([0, 0, ALL], [False, False, True], False),
        ([ALL, 0, 0], [False, False, True], False),
    ],
)
def test_of_three_steps_two_have_to_show_it(
    script: Script,
    caplog: pytest.LogCaptureFixture,
    reduced: Sequence[int],
    over: list[bool],
    said: bool,
) -> None:
    assert script.steps(script.watched(), reduced) == over
    assert bool(caplog.messages) == said
    assert not script.watches


def test_only_what_is_reduced_between_backward_and_step_counts(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    by_hand = script.watched()
    script.reduces(ALL)
    # A step that no backward pass precedes is none of the three.
    assert not any(by_hand.step_begins() for _ in range(5))
    for over in (False, False, True):
        script.reduces(ALL)
        by_hand.backward_ends()
        script.reduces(ALL, OTHERS)
        assert by_hand.step_begins() is over
        if not over:
            # That of another optimizer.
            assert not by_hand.step_begins()
        script.reduces(ALL)
    assert not caplog.messages


def test_what_was_reduced_before_another_backward_pass_does_not_count(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    by_hand = script.watched()
    for _ in range(3):
        by_hand.backward_ends()
        script.reduces(ALL)
        # It adds to gradients, of which nothing has been reduced by hand since.
        by_hand.backward_ends()
        by_hand.step_begins()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([89], False),
        ([91], True),
        ([FIRST, SECOND], True),
        ([109], True),
        ([111], False),
        # A norm of all gradients.
        ([1], False),
    ],
)
def test_all_gradients_are_known_by_their_size_whole_or_in_pieces(
    script: Script, caplog: pytest.LogCaptureFixture, pieces: Sequence[int], said: bool
) -> None:
    by_hand = script.watched()
    for _ in range(2):
        by_hand.backward_ends()
        for elements in pieces:
            script.reduces(elements)
        by_hand.step_begins()
    assert bool(caplog.messages) == said


@pytest.mark.parametrize(
    ("reduced", "said"), [(SECOND, False), (FIRST, True), (ALL, True), (ALL + FIRST, False)]
)
def test_a_parameter_without_a_gradient_may_be_left_out_or_filled_with_zeros(
    script: Script, caplog: pytest.LogCaptureFixture, reduced: int, said: bool
) -> None:
    script.parameters[1].grad = None
    script.steps(script.watched(), [reduced, reduced])
    assert bool(caplog.messages) == said


@pytest.mark.parametrize("is_read", [False, True])
def test_what_the_script_has_not_read_it_cannot_have_reduced(
    script: Script, caplog: pytest.LogCaptureFixture, is_read: bool
) -> None:
    if not is_read:
        script.read.remove(id(script.parameters[0]))
    script.steps(script.watched(), [ALL, ALL])
    assert bool(caplog.messages) == is_read
