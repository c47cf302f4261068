"""How fast jobs are that train at once and began at different moments of their iterations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

__all__ = ["LEAST_ITERATIONS", "common_rates"]

#: iterations of each job in which those that began at once fall out of step
_SETTLING: Final = 1
#: iterations of each job that a rate is made from
_LEAST: Final = 2
#: of each job, for jobs of one pace that take turns
LEAST_ITERATIONS: Final = _SETTLING + _LEAST + 1


def common_rates(starts_s: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Iterations per second of each job, over one and the same time, in which all of them train.

    Jobs that take turns are half a round apart: of one, six iterations end in the time of five and
    a half of the other. So what is done of an iteration at either end of that time counts too.

    Args:
        starts_s: of each job, when its iterations began, the last one ending at the last of them.

    Raises `ValueError` where that time has fewer than two iterations of a job.
    """
    since_s = max(starts[min(_SETTLING, len(starts) - 1)] for starts in starts_s.values())
    until_s = min(starts[-1] for starts in starts_s.values())
    rates = {}
    for job, starts in starts_s.items():
        done = _done(starts, until_s) - _done(starts, since_s) if since_s < until_s else 0.0
        if done < _LEAST:
            raise ValueError(
                f"job {job} had {done:.1f} iterations while all jobs trained, of the {_LEAST} that "
                "make a rate: their paces differ too much for so few"
            )
        rates[job] = done / (until_s - since_s)
    return rates


def _done(starts_s: Sequence[float], at_s: float) -> float:
    """Iterations that are done at this moment, between the first and the last of these."""
    steps = list(pairwise(starts_s))
    step = min(max(0, bisect_right(starts_s, at_s) - 1), len(steps) - 1)
    began_s, ended_s = steps[step]
    return step + (at_s - began_s) / (ended_s - began_s)
