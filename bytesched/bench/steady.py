"""What an iteration of a replicated pipeline takes once it repeats, with its reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bytesched.pipeline.order import Action, Kind, Order, in_turn
from bytesched.pipeline.stages import Pipeline

__all__ = ["bound_s", "reduced_at_end_s"]

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
        free_s, done_s = _iteration(order, pipeline, free_s, ready_s)
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


def _iteration(
    order: Order, pipeline: Pipeline, free_s: Sequence[float], ready_s: Sequence[float]
) -> tuple[list[float], list[float]]:
    """When each rank is at its row's end, and each stage has all its gradients.

    Args:
        free_s: when each rank may begin.
        ready_s: when each stage has the weights of this iteration.
    """
    ends_s: dict[Action, float] = {}
    at_s = list(free_s)
    done_s = [0.0] * order.stages
    for action, needed in in_turn(order.rows, order.stages):
        rank = order.stage_ranks[action.stage]
        start_s = at_s[rank]
        if action.kind is Kind.FORWARD:
            start_s = max(start_s, ready_s[action.stage])
        for need in needed:
            start_s = max(start_s, ends_s[need] + pipeline.crossing_s(need.stage, action.stage))
        at_s[rank] = ends_s[action] = start_s + pipeline.seconds(action.stage, action.kind)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            done_s[action.stage] = at_s[rank]
    return at_s, done_s


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
