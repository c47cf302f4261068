"""The search for an order: a repetend, unrolled; the whole iteration; then parts of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bytesched.errors import ConfigError
from bytesched.pipeline.greedy import greedy
from bytesched.pipeline.order import Action, Kind, Order, in_turn
from bytesched.pipeline.repetend import Repetend, repetend
from bytesched.pipeline.replay import Timeline, replay
from bytesched.pipeline.solver import Budget, cp_model
from bytesched.pipeline.stages import Pipeline
from bytesched.pipeline.ticks import Ticks
from bytesched.pipeline.whole import Rows, best_between
from bytesched.values import size_text

#: actions of an iteration that is searched at once, and of a part of one that is not
_SMALL = 100
_PART = 48
_LARGEST = 2 * _PART
#: of the time: of the repetend, of the whole iteration, of each part
_REPETEND_SHARE = 0.3
_WHOLE_SHARE = 0.4
_PART_SHARE = 0.02
#: of an iteration whose times are no whole ticks, and how fine a bound on it is computed
_ROUNDING = 1e-6
_FINE = 10**9


@dataclass(frozen=True)
class Found:
    """The best order, what it takes by replay, and what is known about better ones."""

    order: Order
    timeline: Timeline
    #: no order ends before that
    bound_s: float
    #: the one with the least memory of the least period
    repetend: Repetend
    ticks: Ticks
    #: the clock ended the search: another run may find another order
    cut_short: bool

    @property
    def gap(self) -> float:
        """By which share of its time the order could be shorter at most; 0: proved best."""
        end_s = self.timeline.end_s
        rounding_s = self.ticks.tick_s / 2 if self.ticks.exact else end_s * _ROUNDING
        if end_s - self.bound_s < rounding_s:
            return 0.0
        return 1 - self.bound_s / end_s


def search(
    pipeline: Pipeline,
    micro_batches: int,
    *,
    memory_bytes: int | None = None,
    split_backward: bool = False,
    time_limit_s: float = 10.0,
    known: Sequence[Order] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """The order that ends first of those that were found, and of those the one that holds least.

    Args:
        memory_bytes: of activations on a rank, at most; None: as many as there are.
        time_limit_s: for all but the import of OR-tools and judging ``known``.
        known: orders to be better than; those for other stages, or that hold more, do not count.

    Raises ``ConfigError`` if no order keeps within the memory, and ``PluginError`` without
    OR-tools.
    """
    least_bytes = pipeline.least_memory_bytes()
    if memory_bytes is not None and memory_bytes < least_bytes:
        raise ConfigError(
            f"{memory_bytes} bytes of memory are too few: a rank holds {least_bytes} bytes of "
            f"activations ({size_text(least_bytes)}) even with one micro-batch at a time; give at "
            "least that, or more ranks"
        )
    cp_model()
    budget = Budget(time_limit_s, clock)
    ticks = Ticks.of(pipeline, split_backward)
    limit = micro_batches * least_bytes if memory_bytes is None else memory_bytes
    bound = ticks.least(micro_batches, limit)
    # What is proved of rounded times need not be true of the times themselves.
    fine = ticks if ticks.exact else Ticks.of(pipeline, split_backward, _FINE)
    least_s = fine.least(micro_batches, limit) * fine.tick_s
    orders = [_order(greedy(ticks, micro_batches, limit, budget))]
    orders += [
        _in_blocks(order, split_backward)
        for order in known
        if order.stage_ranks == pipeline.stage_ranks
        and order.micro_batches == micro_batches
        and (split_backward or not order.splits_backward)
    ]
    began_s = budget.left_s
    best = min(_judged(orders, pipeline, limit), key=_rank_of)
    budget.reserve_s = (began_s - budget.left_s) / len(orders)
    patterns = repetend(ticks, limit, budget, _REPETEND_SHARE)
    for pattern in patterns:
        if budget.left_s == 0:
            break
        unrolled = _unrolled(ticks, pattern, micro_batches)
        best = min([best, *_judged([unrolled], pipeline, limit)], key=_rank_of)
    best, bound = _whole(best, bound, pipeline, ticks, limit, budget)
    return Found(
        best[0],
        best[1],
        min(bound * ticks.tick_s if ticks.exact else least_s, best[1].end_s),
        patterns[0],
        ticks,
        budget.cut_short,
    )


_Judged = tuple[Order, Timeline]


def _whole(
    best: _Judged, bound: int, pipeline: Pipeline, ticks: Ticks, limit: int, budget: Budget
) -> tuple[_Judged, int]:
    """The iteration at once if it is small, then in parts until no part gets better."""
    rows = _rows(best[0])
    if sum(map(len, rows)) <= _SMALL and _ends(best, ticks) > bound:
        everything = [(0, len(row)) for row in rows]
        found = best_between(ticks, rows, everything, limit, bound, budget, _WHOLE_SHARE)
        if found is not None:
            best = min([best, *_judged([_order(found[0])], pipeline, limit)], key=_rank_of)
            bound = max(bound, found[1].bound)
    size = _PART
    while budget.left_s > 0 and _ends(best, ticks) > bound and size <= _LARGEST:
        before = best
        for start in range(0, sum(map(len, rows)), size // 2):
            if budget.left_s == 0 or _ends(best, ticks) <= bound:
                break
            part = _part(best, start, size)
            found = best_between(ticks, _rows(best[0]), part, limit, bound, budget, _PART_SHARE)
            if found is not None:
                # One that is as good is taken too: other parts of it may get better.
                judged = _judged([_order(found[0])], pipeline, limit)
                best = min([*judged, best], key=_end_of)
        if _end_of(best) == _end_of(before):
            size *= 2
    return best, bound


def _ends(judged: _Judged, ticks: Ticks) -> float:
    return judged[1].end_s / ticks.tick_s - 0.5


def _part(judged: _Judged, start: int, size: int) -> list[tuple[int, int]]:
    """Of every row, the places of those actions that are among ``size`` of all, by time."""
    order, timeline = judged
    rows = _rows(order)
    turn = {action: n for n, (action, _) in enumerate(in_turn(rows, order.stages))}
    spans = sorted(timeline.spans, key=lambda span: (span.start_s, turn[span.action]))
    before, until = ([span.rank for span in spans[:end]] for end in (start, start + size))
    return [(before.count(rank), until.count(rank)) for rank in range(len(rows))]


def _end_of(judged: _Judged) -> float:
    return round(judged[1].end_s, 9)


def _rank_of(judged: _Judged) -> tuple[float, int]:
    return _end_of(judged), max(judged[1].peak_bytes)


def _judged(orders: Sequence[Order], pipeline: Pipeline, limit: int) -> list[_Judged]:
    """Those within the memory."""
    judged = [(order, replay(order, pipeline)) for order in orders]
    return [each for each in judged if max(each[1].peak_bytes) <= limit]


def _rows(order: Order) -> Rows:
    return tuple(tuple(action for action in row if action is not None) for row in order.rows)


def _order(rows: Rows) -> Order:
    return Order(rows, "the order that was found")


def _in_blocks(order: Order, split_backward: bool) -> Order:
    """The same order as the search would write it: backwards are cut wherever that is of use."""
    rows: list[list[Action]] = []
    for row in _rows(order):
        rows.append([])
        for stage, kind, micro_batch in row:
            if stage and kind is Kind.BACKWARD and split_backward:
                halves = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
                rows[-1].extend(Action(stage, half, micro_batch) for half in halves)
            elif stage or kind in (Kind.FORWARD, Kind.BACKWARD):
                rows[-1].append(Action(stage, kind, micro_batch))
            elif kind is Kind.WEIGHT_GRADIENT:
                rows[-1].append(Action(stage, Kind.BACKWARD, micro_batch))
    return _order(tuple(map(tuple, rows)))


def _unrolled(ticks: Ticks, pattern: Repetend, micro_batches: int) -> Order:
    """The rows of all micro-batches; replay then moves everything to where it can be first."""
    timed = sorted(
        (start + micro_batch * pattern.period, min(block.duration, 1), n, micro_batch)
        for n, (start, block) in enumerate(zip(pattern.starts, ticks.blocks, strict=True))
        for micro_batch in range(micro_batches)
    )
    rows: list[list[Action]] = [[] for _ in range(ticks.ranks)]
    for _, _, n, micro_batch in timed:
        rows[ticks.blocks[n].rank].append(ticks.blocks[n].of(micro_batch))
    return _order(tuple(map(tuple, rows)))
