"""What an iteration of a replicated pipeline takes once it repeats, with its reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bytesched.pipeline.order import Order
from bytesched.pipeline.replay import completed_s, follow
from bytesched.pipeline.stages import Pipeline

__all__ = ["arrivals_s", "bound_s", "reduced_at_end_s"]

#: iterations until one is like the other, and those that are averaged after them
_SETTLING: Final = 4
_AVERAGED: Final = 8


def reduced_at_end_s(order: Order, pipeline: Pipeline) -> float:
    """Seconds of an iteration whose ranks reduce all their stages after their row, and wait."""
    return _steady_s(order, pipeline, crosses=False)


def bound_s(order: Order, pipeline: Pipeline) -> float:
    """Seconds of an iteration at best: reductions delay nothing but what needs them.

    A stage is on its rank's link as soon as its last gradient is there, the stage that is needed
    first goes first and interrupts others, and only the stage's next forward waits for it. Messages
    between stages are not made to wait for reductions.
    """
    return _steady_s(order, pipeline, crosses=True)


def _steady_s(order: Order, pipeline: Pipeline, *, crosses: bool) -> float:
    free_s = [0.0] * order.ranks
    ready_s = [0.0] * order.stages
    over_s: list[float] = []
    for _ in range(_SETTLING + _AVERAGED):
        spans, _ = follow(order, pipeline, free_s, ready_s)
        for span in spans.values():
            free_s[span.rank] = max(free_s[span.rank], span.end_s)
        done_s = completed_s(spans.values(), order.stages)
        for rank, row in enumerate(order.rows):
            stages = list(dict.fromkeys(action.stage for action in row if action is not None))
            jobs = [(done_s[stage], pipeline.reduction_s(stage)) for stage in stages]
            if crosses:
                for stage, end_s in zip(stages, arrivals_s(jobs), strict=True):
                    ready_s[stage] = end_s
            else:
                free_s[rank] += sum(seconds for _, seconds in jobs)
        over_s.append(free_s[0])
    return (over_s[-1] - over_s[_SETTLING - 1]) / _AVERAGED


def arrivals_s(jobs: Sequence[tuple[float, float]]) -> list[float]:
    """When each job's transfer has ended on one link, the first of those that are there first.

    Args:
        jobs: when each is there, and how long it is on the link, the most urgent first.
    """
    left_s = [seconds for _, seconds in jobs]
    found_s = [release_s for release_s, _ in jobs]
    now_s = 0.0
    while any(left_s):
        waiting = [job for job, left in enumerate(left_s) if left]
        there = [job for job in waiting if jobs[job][0] <= now_s]
        later = [jobs[job][0] for job in waiting if jobs[job][0] > now_s]
        if not there:
            now_s = min(later)
            continue
        end_s = now_s + left_s[there[0]]
        if later and min(later) < end_s:
            left_s[there[0]] = end_s - min(later)
            now_s = min(later)
        else:
            left_s[there[0]] = 0.0
            found_s[there[0]] = now_s = end_s
    return found_s
