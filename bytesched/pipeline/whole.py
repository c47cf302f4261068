"""A whole iteration: the actions between two places of every row, in the best order.

What lies before and after them keeps its order, so that a large iteration is searched in parts
(large neighbourhood search, Shaw, CP 1998) and a small one at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bytesched.pipeline.order import Action, in_turn
from bytesched.pipeline.solver import Budget, Solution, cp_model, solve
from bytesched.pipeline.ticks import Block, Ticks

__all__ = ["Rows", "best_between"]

Rows = tuple[tuple[Action, ...], ...]


def best_between(
    ticks: Ticks,
    rows: Rows,
    between: Sequence[tuple[int, int]],
    memory_bytes: int,
    least: int,
    budget: Budget,
    share: float,
) -> tuple[Rows, Solution] | None:
    """Rows whose actions from ``between[rank][0]`` up to ``between[rank][1]`` stand at their best.

    Args:
        least: no iteration ends before that, in ticks.
    """
    model = cp_model().CpModel()
    block_of = {(block.stage, block.kind): n for n, block in enumerate(ticks.blocks)}
    actions = [action for row in rows for action in row]
    blocks = {action: ticks.blocks[block_of[action.stage, action.kind]] for action in actions}
    horizon = sum(
        block.duration + sum(gap for _, gap in block.needs) for block in blocks.values()
    ) + sum(ticks.reductions)
    starts = {action: model.new_int_var(0, horizon, "") for action in actions}
    known = _starts(ticks, rows, blocks)
    for action, start in starts.items():
        model.add_hint(start, known[action])
        for needed, gap in blocks[action].needs:
            need = ticks.blocks[needed].of(action.micro_batch)
            model.add(start >= starts[need] + ticks.blocks[needed].duration + gap)
    for row, (first, last) in zip(rows, between, strict=True):
        _order_row(model, row, first, last, starts, blocks, memory_bytes)
    end = model.new_int_var(least, horizon, "")
    for action, start in starts.items():
        model.add(end >= start + blocks[action].duration)
    _reduce(model, ticks, starts, blocks, end, horizon)
    model.minimize(end)
    solution = solve(model, budget, share)
    if solution is None:
        return None
    place = {action: n for row in rows for n, action in enumerate(row)}

    def moment(action: Action) -> tuple[int, int, int]:
        # What takes no time stands before what starts with its end.
        return (solution.value(starts[action]), min(blocks[action].duration, 1), place[action])

    found = tuple(
        (*row[:first], *sorted(row[first:last], key=moment), *row[last:])
        for row, (first, last) in zip(rows, between, strict=True)
    )
    return found, solution


def _order_row(
    model: Any,
    row: Sequence[Action],
    first: int,
    last: int,
    starts: dict[Action, Any],
    blocks: dict[Action, Block],
    memory_bytes: int,
) -> None:
    """One thing at a time: in the row's order outside, in any that memory allows between."""
    inner = row[first:last]
    for sequence in (row[:first], row[last:]):
        for action, following in pairwise(sequence):
            model.add(starts[following] >= starts[action] + blocks[action].duration)
    for action in inner:
        if first:
            before = row[first - 1]
            model.add(starts[action] >= starts[before] + blocks[before].duration)
        if last < len(row):
            model.add(starts[row[last]] >= starts[action] + blocks[action].duration)
    model.add_no_overlap(
        [
            model.new_fixed_size_interval_var(starts[action], blocks[action].duration, "")
            for action in inner
            if blocks[action].duration
        ]
    )
    # Micro-batches are alike: none overtakes another that it did not overtake before.
    latest: dict[tuple[int, str], Action] = {}
    for action in sorted(inner, key=lambda each: each.micro_batch):
        before_it = latest.get((action.stage, action.kind.value))
        if before_it is not None:
            model.add(starts[action] >= starts[before_it] + blocks[before_it].duration)
        latest[action.stage, action.kind.value] = action
    held = sum(blocks[action].held for action in row[:first])
    changes = [action for action in inner if blocks[action].held]
    if changes:
        model.add_reservoir_constraint(
            [
                starts[action] + (blocks[action].duration if blocks[action].held < 0 else 0)
                for action in changes
            ],
            [blocks[action].held for action in changes],
            -held,
            memory_bytes - held,
        )


def _reduce(
    model: Any,
    ticks: Ticks,
    starts: dict[Action, Any],
    blocks: dict[Action, Block],
    end: Any,
    horizon: int,
) -> None:
    links: list[list[Any]] = [[] for _ in range(ticks.ranks)]
    for stage, duration in enumerate(ticks.reductions):
        if not duration:
            continue
        start = model.new_int_var(0, horizon, "")
        for action, its in starts.items():
            if action.stage == stage and blocks[action].held <= 0:
                model.add(start >= its + blocks[action].duration)
        model.add(end >= start + duration)
        rank = ticks.stage_ranks[stage]
        links[rank].append(model.new_fixed_size_interval_var(start, duration, ""))
    for link in links:
        if len(link) > 1:
            model.add_no_overlap(link)


def _starts(ticks: Ticks, rows: Rows, blocks: dict[Action, Block]) -> dict[Action, int]:
    """When each action starts if ranks follow the rows."""
    found: dict[Action, int] = {}
    free = [0] * len(rows)
    for action, _ in in_turn(rows, len(ticks.stage_ranks)):
        block = blocks[action]
        needed = [(ticks.blocks[n].of(action.micro_batch), gap) for n, gap in block.needs]
        arrivals = (found[need] + blocks[need].duration + gap for need, gap in needed)
        found[action] = max(free[block.rank], *arrivals, 0)
        free[block.rank] = found[action] + block.duration
    return found
