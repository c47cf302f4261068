"""Gradients are the session's or the framework's, and are given back once each time."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from bytesched.plugins.routes.handover import Handover


class Framework:
    """What takes part in a handover; says what happened."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def take(self) -> Callable[[], None]:
        number = self.log.count("take")
        self.log.append("take")
        return lambda: self.log.append(f"give back {number}")


def test_with_no_framework_nothing_happens() -> None:
    handover = Handover()
    handover.give_back()
    handover.take()
    assert not handover.off
    assert handover.knobs == frozenset()


def test_gradients_are_taken_at_once() -> None:
    framework, handover = Framework(), Handover()
    handover.use(framework.take, can_stop=False)
    assert framework.log == ["take"]


def test_only_where_it_may_happen_again_it_can_be_switched() -> None:
    for can_stop in (False, True):
        handover = Handover()
        handover.use(Framework().take, can_stop=can_stop)
        assert handover.knobs == ({"enabled"} if can_stop else set())


@given(st.lists(st.sampled_from(["off", "on"]), max_size=12))
def test_each_taking_is_given_back_once(switches: list[str]) -> None:
    framework, handover = Framework(), Handover()
    handover.use(framework.take, can_stop=True)
    expected = ["take"]
    is_ours, taken = True, 1
    for switch in switches:
        if switch == "off":
            handover.give_back()
            handover.off = True
            if is_ours:
                expected.append(f"give back {taken - 1}")
            is_ours = False
        elif not is_ours:
            handover.take()
            expected.append("take")
            is_ours, taken = True, taken + 1
        assert framework.log == expected
        assert handover.off is not is_ours
