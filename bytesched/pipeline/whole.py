"""A whole iteration: the actions between two places of every row, in the best order.

What lies before and after them keeps its order, so that a large iteration is searched in parts
(large neighbourhood search, Shaw, CP 1998) and a small one at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bytesched.pipeline.order import Action, in_turn
from bytesched.pipeline.solver import Budget, OutOfTimeError, Solution, Verdict, cp_model, solve
from bytesched.pipeline.ticks import Ticks

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
    part = _Part(ticks, rows, between)
    try:
        part.model_it(memory_bytes, least, budget)
    except OutOfTimeError:
        return None
    solution = solve(part.model, budget, share)
    if isinstance(solution, Verdict):
        return None

    def moment(action: Action) -> tuple[int, int, int, int]:
        # What takes no time stands before what starts with its end, and after what it needs.
        n = part.number[action]
        time = solution.value(part.starts[action])
        return time, min(ticks.blocks[n].duration, 1), n, action.micro_batch

    found = tuple(
        (*row[:first], *sorted(row[first:last], key=moment), *row[last:])
        for row, (first, last) in zip(rows, between, strict=True)
    )
    return found, solution


class _Part:
    """The actions between two places of every row, and when each of all starts now.

    What lies before the part starts when it does now; of what lies after, its length counts.
    """

    model: Any

    def __init__(self, ticks: Ticks, rows: Rows, between: Sequence[tuple[int, int]]) -> None:
        self._ticks = ticks
        self._rows = rows
        self._between = between
        at = {(block.stage, block.kind): n for n, block in enumerate(ticks.blocks)}
        #: of each action, its block
        self.number = {each: at[each.stage, each.kind] for row in rows for each in row}
        self._blocks = {each: ticks.blocks[n] for each, n in self.number.items()}
        self._known: dict[Action, int] = {}
        free = [0] * len(rows)
        for action, _ in in_turn(rows, len(ticks.stage_ranks)):
            rank, arrivals = self._blocks[action].rank, self._arrivals(self._known, action)
            self._known[action] = max(free[rank], *arrivals, 0)
            free[rank] = self._over(self._known, action)
        self._parts = [row[first:last] for row, (first, last) in zip(rows, between, strict=True)]
        self._is_all = sum(map(len, self._parts)) == len(self._blocks)
        #: variables, or numbers where they are known
        self.starts: dict[Action, Any] = dict(self._known)

    def _over(self, starts: Mapping[Action, Any], action: Action) -> Any:
        return starts[action] + self._blocks[action].duration

    def _arrivals(self, starts: Mapping[Action, Any], action: Action) -> list[Any]:
        """When what an action needs is there."""
        blocks = self._ticks.blocks
        needed = [(blocks[n].of(action.micro_batch), gap) for n, gap in self._blocks[action].needs]
        return [self._over(starts, need) + gap for need, gap in needed]

    def model_it(self, memory_bytes: int, least: int, budget: Budget) -> None:
        """Builds the model. Raises ``OutOfTimeError``."""
        budget.check()
        self.model = model = cp_model().CpModel()
        horizon = max(self._over(self._known, action) for action in self._known)
        horizon += sum(self._ticks.reductions)
        tails = self._tails()
        fixed = (
            self._over(self._known, action) + tails[action]
            for row, (first, _) in zip(self._rows, self._between, strict=True)
            for action in row[:first]
        )
        end = model.new_int_var(max(least, *fixed, 0), horizon, "")
        lasts = [model.new_int_var(0, horizon, "") for part in self._parts if part]
        for last_end, part in zip(lasts, filter(None, self._parts), strict=True):
            model.add(end >= last_end)
            for action in part:
                self.starts[action] = model.new_int_var(0, horizon, "")
                model.add_hint(self.starts[action], self._known[action])
                model.add(last_end >= self._over(self.starts, action) + tails[action])
        for row, (first, last) in zip(self._rows, self._between, strict=True):
            budget.check()
            self._order_row(row[:first], row[first:last], memory_bytes)
        if self._is_all:
            self._reduce(end, horizon)
            model.minimize(end)
        else:
            # Ranks that are done earlier are of use to the next part, also where another decides.
            model.minimize(len(self._parts) * end + sum(lasts))

    def _order_row(
        self, before: Sequence[Action], inner: Sequence[Action], memory_bytes: int
    ) -> None:
        """One thing at a time after what comes before, in any order that needs and memory allow."""
        model, blocks, starts = self.model, self._blocks, self.starts
        free = self._over(starts, before[-1]) if before else 0
        for action in inner:
            model.add(starts[action] >= free)
            for arrival in self._arrivals(starts, action):
                model.add(starts[action] >= arrival)
        self._one_at_a_time((starts[each], blocks[each].duration) for each in inner)
        # Micro-batches are alike: none overtakes another that it did not overtake before.
        latest: dict[int, Action] = {}
        for action in sorted(inner, key=lambda each: each.micro_batch):
            n = self.number[action]
            if n in latest:
                model.add(starts[action] >= self._over(starts, latest[n]))
            latest[n] = action
        held = sum(blocks[action].held for action in before)
        changes = [action for action in inner if blocks[action].held]
        if changes:
            model.add_reservoir_constraint(
                [
                    self._over(starts, action) if blocks[action].held < 0 else starts[action]
                    for action in changes
                ],
                [blocks[action].held for action in changes],
                -held,
                memory_bytes - held,
            )

    def _one_at_a_time(self, spans: Iterable[tuple[Any, int]]) -> None:
        interval = self.model.new_fixed_size_interval_var
        self.model.add_no_overlap([interval(start, time, "") for start, time in spans if time])

    def _reduce(self, end: Any, horizon: int) -> None:
        links: list[list[tuple[Any, int]]] = [[] for _ in range(self._ticks.ranks)]
        for stage, duration in enumerate(self._ticks.reductions):
            if not duration:
                continue
            start = self.model.new_int_var(0, horizon, "")
            for action, block in self._blocks.items():
                if action.stage == stage and block.held <= 0:
                    self.model.add(start >= self._over(self.starts, action))
            self.model.add(end >= start + duration)
            links[self._ticks.stage_ranks[stage]].append((start, duration))
        for link in links:
            if len(link) > 1:
                self._one_at_a_time(link)

    def _tails(self) -> dict[Action, int]:
        """What follows the end of each action, of what lies after the part and of reductions.

        Links take reductions in the order in which they do now, unless everything is searched.
        """
        ticks, blocks = self._ticks, self._blocks
        tails = dict.fromkeys(blocks, 0)
        if self._is_all:
            return tails
        done = [0] * len(ticks.stage_ranks)
        for action in blocks:
            done[action.stage] = max(done[action.stage], self._over(self._known, action))
        following = [0] * ticks.ranks
        reduced = [0] * len(done)
        for stage in sorted(range(len(done)), key=lambda each: (-done[each], each)):
            following[ticks.stage_ranks[stage]] += ticks.reductions[stage]
            reduced[stage] = following[ticks.stage_ranks[stage]]
        place = {action: n for row in self._rows for n, action in enumerate(row)}
        for action in reversed(self._known):
            block = blocks[action]
            tails[action] = max(tails[action], reduced[action.stage] if block.held <= 0 else 0)
            first, last = self._between[block.rank]
            n, row = place[action], self._rows[block.rank]
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
