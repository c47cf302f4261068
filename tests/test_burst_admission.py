"""When a background step may begin, in virtual time."""

from __future__ import annotations

import pytest

from bytesched.burst.admission import CONTROL_EVERY, Admission

MS = 1_000_000


class Foreground:
    """Iterations with one gap of a given length, and background steps where they are admitted."""

    def __init__(self, limit: float = 0.05) -> None:
        self.admission = Admission(limit)
        self.now_ns = 0
        self.step_ns = 2 * MS
        #: how much longer than itself each step keeps the foreground from going on
        self.harm_ns = 0

    def iterate(self, *gaps: tuple[str, int]) -> int:
        """One iteration; how many steps ran in it."""
        self.admission.iteration_begins(self.now_ns)
        self.now_ns += 10 * MS
        steps = 0
        for name, length_ns in gaps:
            end_ns = self.now_ns + length_ns
            self.admission.gap_begins(name, self.now_ns)
            while self.admission.fits(self.now_ns):
                self.now_ns += self.step_ns
                self.admission.step_took(self.step_ns)
                steps += 1
            self.admission.gap_ends(end_ns)
            self.now_ns = max(self.now_ns, end_ns) + steps * self.harm_ns
        return steps


def trained(foreground: Foreground, *gaps: tuple[str, int], iterations: int = 12) -> Foreground:
    for _ in range(iterations):
        foreground.iterate(*gaps)
    return foreground


def test_only_steps_that_fit_begin() -> None:
    foreground = trained(Foreground(), ("wide", 7 * MS), ("narrow", MS))
    assert foreground.iterate(("wide", 7 * MS), ("narrow", MS)) == 3
    assert foreground.iterate(("narrow", MS)) == 0


def test_a_gap_is_as_long_as_the_shortest_of_the_last() -> None:
    foreground = trained(Foreground(), ("gap", 9 * MS))
    foreground.iterate(("gap", 3 * MS))
    assert foreground.iterate(("gap", 9 * MS)) == 1


def test_a_gap_that_is_not_known_yet_is_left_alone() -> None:
    foreground = trained(Foreground(), ("gap", 9 * MS))
    assert foreground.iterate(("new", 90 * MS)) == 0


def test_a_step_is_as_long_as_the_longest_of_the_last() -> None:
    foreground = trained(Foreground(), ("gap", 9 * MS))
    foreground.step_ns = 8 * MS
    foreground.iterate(("gap", 9 * MS))
    foreground.step_ns = 2 * MS
    assert foreground.iterate(("gap", 9 * MS)) == 1


def test_some_iterations_tell_what_the_foreground_loses() -> None:
    foreground = Foreground()
    steps = [foreground.iterate(("gap", 9 * MS)) for _ in range(5 * CONTROL_EVERY)]
    assert not any(steps[CONTROL_EVERY - 1 :: CONTROL_EVERY])
    assert foreground.admission.slowdown == pytest.approx(0, abs=0.01)
    assert foreground.admission.margin == 1


def test_a_background_that_harms_is_held_back() -> None:
    foreground = Foreground()
    foreground.harm_ns = 2 * MS
    trained(foreground, ("gap", 9 * MS), iterations=20 * CONTROL_EVERY)
    assert foreground.admission.slowdown < 0.3
    assert foreground.admission.margin > 1
    last = [foreground.iterate(("gap", 9 * MS)) for _ in range(4 * CONTROL_EVERY)]
    assert sum(last) < 4 * CONTROL_EVERY


@pytest.mark.parametrize("limit", [0, -0.1, 1.5])
def test_an_impossible_limit_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="slow-down limit"):
        Admission(limit)
