"""A whole iteration: the actions between two places of every row, in the best order.

What lies before and after them keeps its order, so that a large iteration is searched in parts
(large neighbourhood search, Shaw, CP 1998) and a small one at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bytesched.pipeline.order import Action, in_turn
from bytesched.pipeline.solver import Budget, OutOfTimeError, Solution, Verdict, cp_model, solve
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
    block_of = {(block.stage, block.kind): n for n, block in enumerate(ticks.blocks)}
    blocks = {
        action: ticks.blocks[block_of[action.stage, action.kind]] for row in rows for action in row
    }
    known = _starts(ticks, rows, blocks)
    horizon = max(known[action] + blocks[action].duration for action in known)
    horizon += sum(ticks.reductions)
    parts = [row[first:last] for row, (first, last) in zip(rows, between, strict=True)]
    everything = sum(map(len, parts)) == len(blocks)
    tails = _tails(ticks, rows, between, blocks, known, everything)
    try:
        budget.check()
        model = cp_model().CpModel()
        # What lies before starts when it does now; of what lies after, its length counts.
        starts: dict[Action, Any] = dict(known)
        fixed = (
            known[action] + blocks[action].duration + tails[action]
            for row, (first, _) in zip(rows, between, strict=True)
            for action in row[:first]
        )
        end = model.new_int_var(max(least, *fixed, 0), horizon, "")
        lasts = [model.new_int_var(0, horizon, "") for part in parts if part]
        for last_end, part in zip(lasts, filter(None, parts), strict=True):
            model.add(end >= last_end)
            for action in part:
                starts[action] = model.new_int_var(0, horizon, "")
                model.add_hint(starts[action], known[action])
                over = starts[action] + blocks[action].duration
                model.add(last_end >= over + tails[action])
        for row, (first, last) in zip(rows, between, strict=True):
            budget.check()
            _order_row(model, ticks, row, first, last, starts, blocks, memory_bytes)
    except OutOfTimeError:
        return None
    if everything:
        _reduce(model, ticks, starts, blocks, end, horizon)
        model.minimize(end)
    else:
        # Ranks that are done earlier are of use to the next part, also where another decides.
        model.minimize(len(parts) * end + sum(lasts))
    solution = solve(model, budget, share)
    if isinstance(solution, Verdict):
        return None

    def moment(action: Action) -> tuple[int, int, int, int]:
        # What takes no time stands before what starts with its end, and after what it needs.
        n = block_of[action.stage, action.kind]
        time = solution.value(starts[action])
        return time, min(ticks.blocks[n].duration, 1), n, action.micro_batch

    found = tuple(
        (*row[:first], *sorted(row[first:last], key=moment), *row[last:])
        for row, (first, last) in zip(rows, between, strict=True)
    )
    return found, solution


def _order_row(
    model: Any,
    ticks: Ticks,
    row: Sequence[Action],
    first: int,
    last: int,
    starts: dict[Action, Any],
    blocks: dict[Action, Block],
    memory_bytes: int,
) -> None:
    """One thing at a time after what comes before, in any order that needs and memory allow."""
    inner = row[first:last]
    free = starts[row[first - 1]] + blocks[row[first - 1]].duration if first else 0
    for action in inner:
        model.add(starts[action] >= free)
        for needed, gap in blocks[action].needs:
            need = ticks.blocks[needed].of(action.micro_batch)
            model.add(starts[action] >= starts[need] + ticks.blocks[needed].duration + gap)
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
    """When each action starts if ranks follow the rows, none before what it needs."""
    found: dict[Action, int] = {}
    free = [0] * len(rows)
    for action, _ in in_turn(rows, len(ticks.stage_ranks)):
        block = blocks[action]
        needed = [(ticks.blocks[n].of(action.micro_batch), gap) for n, gap in block.needs]
        arrivals = (found[need] + blocks[need].duration + gap for need, gap in needed)
        found[action] = max(free[block.rank], *arrivals, 0)
        free[block.rank] = found[action] + block.duration
    return found


def _tails(
    ticks: Ticks,
    rows: Rows,
    between: Sequence[tuple[int, int]],
    blocks: dict[Action, Block],
    known: dict[Action, int],
    everything: bool,
) -> dict[Action, int]:
    """What follows the end of each action, of what lies after the part and of reductions.

    Links take reductions in the order in which they do now, unless everything is searched.
    """
    tails = dict.fromkeys(blocks, 0)
    if everything:
        return tails
    done = [0] * len(ticks.stage_ranks)
    for action, block in blocks.items():
        done[action.stage] = max(done[action.stage], known[action] + block.duration)
    following = [0] * ticks.ranks
    reduced = [0] * len(done)
    for stage in sorted(range(len(done)), key=lambda each: (-done[each], each)):
        following[ticks.stage_ranks[stage]] += ticks.reductions[stage]
        reduced[stage] = following[ticks.stage_ranks[stage]]
    place = {action: n for row in rows for n, action in enumerate(row)}
    for action in reversed(known):
        block = blocks[action]
        tails[action] = max(tails[action], reduced[action.stage] if block.held <= 0 else 0)
        first, last = between[block.rank]
        n, row = place[action], rows[block.rank]
        if n < last:
            continue
        length = block.duration + tails[action]
        for needed, gap in block.needs:
            need = ticks.blocks[needed].of(action.micro_batch)
            tails[need] = max(tails[need], gap + length)
        # All of the part comes before the first that lies after it.
        for before in row[first:last] if n == last > first else row[max(n - 1, 0) : n]:
            tails[before] = max(tails[before], length)
    return tails
