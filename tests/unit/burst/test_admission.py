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
        #: how much longer than itself a step keeps the foreground from going on
        self.harm_ns = 0
        #: one in so many steps does so
        self.harms_every = 1
        self.steps = 0
        #: lost to steps so far
        self.lost_ns = 0

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
            harms = (self.steps + steps) // self.harms_every - self.steps // self.harms_every
            self.steps += steps
            went_on_ns = max(self.now_ns, end_ns) + harms * self.harm_ns
            self.lost_ns += went_on_ns - end_ns
            self.now_ns = went_on_ns
        self.admission.iteration_ends(self.now_ns)
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


@pytest.mark.parametrize(
    ("step_ms", "harm_ms", "every"),
    [(2, 2, 1), (2, 30, 9), (2, 400, 40), (2, 0.5, 1), (0.05, 0.05, 1)],
    ids=["each", "some", "few-but-much", "each-a-little", "shortest-steps"],
)
def test_the_throughput_of_the_foreground_keeps_to_the_limit(
    step_ms: float, harm_ms: float, every: int
) -> None:
    """Also where most iterations lose nothing, so that their median would not tell."""
    foreground = Foreground()
    foreground.step_ns = round(step_ms * MS)
    trained(foreground, ("gap", 9 * MS), iterations=2 * CONTROL_EVERY)
    harm_ns = round(harm_ms * MS)
    foreground.harm_ns, foreground.harms_every = harm_ns, every
    began_ns, iterations = foreground.now_ns, 1000
    trained(foreground, ("gap", 9 * MS), iterations=iterations)
    alone_ns = iterations * 19 * MS
    assert foreground.now_ns - began_ns == alone_ns + foreground.lost_ns
    # What one iteration can lose before anybody knows comes on top.
    most_steps = 9 * MS // foreground.step_ns
    assert foreground.lost_ns <= 0.05 * alone_ns + most_steps * harm_ns
    assert foreground.steps > iterations / 20


def test_what_comes_between_iterations_is_not_the_backgrounds_doing() -> None:
    """Such as an evaluation."""
    foreground = trained(Foreground(), ("gap", 9 * MS), iterations=4 * CONTROL_EVERY)
    for _ in range(4 * CONTROL_EVERY):
        foreground.now_ns += 900 * MS
        foreground.iterate(("gap", 9 * MS))
    assert foreground.admission.slowdown == pytest.approx(0, abs=0.01)
    assert foreground.iterate(("gap", 9 * MS)) == 4


@pytest.mark.parametrize("limit", [0, -0.1, 1.5])
def test_an_impossible_limit_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="slow-down limit"):
        Admission(limit)
