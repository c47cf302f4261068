"""Whether training is faster with a plan than without: blocks of iterations take turns.

Medians of a few iterations say little: what counts is the interval in which their ratio lies, that
of Hodges and Lehmann: of all ratios of one iteration to another, those that Mann and Whitney's test
would not reject (Hollander, Wolfe, Chicken: Nonparametric Statistical Methods, 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from math import floor, inf, sqrt
from statistics import median
from typing import Final

__all__ = ["MOST_TURNS", "Comparison", "Verdict", "compared"]

#: standard deviations of the normal distribution that hold 95 % of it
_SIGMAS: Final = 1.96
#: one turn decides where the ratio is as far from 1, and its blocks as long: what is close, or
#: short, may be a moment of the machine; short ones decide against a plan that is far behind
_CLEAR: Final = 1.1
_FAR: Final = 1.2
_LONG_S: Final = 0.5
#: pairs of blocks after which it is decided
MOST_TURNS: Final = 3


class Verdict(Enum):
    """What a run does after some turns."""

    PLANNED = "the plan is faster"
    PLAIN = "the plan is not faster"
    OPEN = "neither is clearly ahead: there is another turn"


@dataclass(frozen=True)
class Comparison:
    """Iterations without a plan and with it, in seconds.

    Args:
        plain_s: the median without.
        planned_s: the median with it.
        iterations: on each side.
        low: the least of the ratios of the first to the second, with 95 % confidence.
        high: the largest.
        is_alike: the medians of each turn are on the same side.
    """

    plain_s: float
    planned_s: float
    iterations: int
    low: float
    high: float
    is_alike: bool = True

    @property
    def ratio(self) -> float:
        """How many times as fast the plan makes it."""
        return self.plain_s / self.planned_s

    def verdict(self, turns: int) -> Verdict:
        """What follows after so many ``turns``, from 1 on."""
        is_long = self.iterations * self.planned_s >= _LONG_S
        ahead, behind = 1.0, 1.0
        if turns == 1:
            ahead, behind = (_CLEAR, _CLEAR) if is_long else (inf, _FAR)
        if self.is_alike:
            if self.low > ahead:
                return Verdict.PLANNED
            if self.high * behind < 1:
                return Verdict.PLAIN
        return Verdict.OPEN if turns < MOST_TURNS else Verdict.PLAIN

    def __str__(self) -> str:
        plain, planned = map(_ms, (self.plain_s, self.planned_s))
        measured = f"{plain} ms with plain DDP, {planned} with bytesched"
        each = f"{self.iterations} iterations each"
        if self.low > 1 and self.is_alike:
            return f"{measured} ({each}): {self.ratio:.2f} x as fast"
        why = (
            "plain DDP is faster here"
            if self.high < 1 and self.is_alike
            else "within the noise of iterations"
        )
        return f"{measured} ({each}): {why}, so DDP goes on by itself"


def compared(
    plain_s: Sequence[Sequence[float]], planned_s: Sequence[Sequence[float]]
) -> Comparison:
    """The iterations ``plain_s`` beside ``planned_s``, a block for each turn.

    Raises ValueError unless each block has some, all of them longer than nothing.
    """
    blocks = [*plain_s, *planned_s]
    if not blocks or not all(blocks) or min(map(min, blocks)) <= 0:
        raise ValueError(f"nothing to compare: {plain_s} and {planned_s}")
    ones, others = [*chain(*plain_s)], [*chain(*planned_s)]
    ratios = sorted(one / other for one in ones for other in others)
    spread = sqrt(len(ratios) * (len(ones) + len(others) + 1) / 12)
    left_out = max(0, floor(len(ratios) / 2 - _SIGMAS * spread))
    sides = {median(one) > median(other) for one, other in zip(plain_s, planned_s, strict=True)}
    return Comparison(
        median(ones),
        median(others),
        min(len(ones), len(others)),
        ratios[left_out],
        ratios[-1 - left_out],
        len(sides) == 1,
    )


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"
