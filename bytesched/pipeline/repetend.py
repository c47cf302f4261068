"""The repetend: what all ranks do again and again while micro-batches keep coming.

Modulo scheduling (Rau, MICRO 1994) of the blocks of one micro-batch, where Tessel (Lin et al., HPCA
2024) enumerates: a block starts at ``period * turn + phase``, and no two blocks of a rank overlap
modulo the period. Crossings between ranks take their time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bytesched.pipeline.solver import Budget, Solution, cp_model, solve
from bytesched.pipeline.ticks import Ticks

__all__ = ["Repetend", "repetend"]


@dataclass(frozen=True, slots=True)
class Repetend:
    """A micro-batch starts every ``period``; each of its blocks at its own time after that."""

    period: int
    starts: tuple[int, ...]
    #: bytes on the fullest rank once micro-batches keep coming
    memory_bytes: int
    #: no repetend of the period holds less
    proved: bool
    #: ranks never idle for want of work: the busiest one always computes
    full: bool


def repetend(ticks: Ticks, memory_bytes: int, budget: Budget, share: float) -> list[Repetend]:
    """The one that holds least of those with the least period, and the shortest within memory.

    Empty if none was found in time.
    """
    least = max(ticks.work(rank) for rank in range(ticks.ranks))
    longest = sum(block.duration + sum(gap for _, gap in block.needs) for block in ticks.blocks)
    period, tries = least, 0
    while period <= longest and tries < 8:
        model, peak, span, starts = _model(ticks, period, memory_bytes)
        model.minimize(peak)
        leanest = solve(model, budget, share / 4)
        if leanest is not None:
            found = [_repetend(period, least, starts, leanest, leanest.objective, leanest.optimal)]
            for limit in dict.fromkeys((leanest.objective, memory_bytes)):
                model, peak, span, starts = _model(ticks, period, limit)
                model.minimize(span)
                shortest = solve(model, budget, share / 4)
                if shortest is not None:
                    proved = leanest.optimal and limit == leanest.objective
                    held = shortest.value(peak)
                    found.append(_repetend(period, least, starts, shortest, held, proved))
            return found
        period = max(period + 1, round(period * 1.15))
        tries += 1
    return []


def _repetend(
    period: int, least: int, starts: list[Any], solution: Solution, held: int, proved: bool
) -> Repetend:
    times = tuple(solution.value(start) for start in starts)
    return Repetend(period, times, held, proved, period == least)


def _model(ticks: Ticks, period: int, memory_bytes: int) -> tuple[Any, Any, Any, list[Any]]:
    """The model, the variables for peak and span, and those of the starts."""
    model = cp_model().CpModel()
    blocks = ticks.blocks
    turns = len(blocks)
    starts = [model.new_int_var(0, period * (turns + 1), "") for _ in blocks]
    phase = [model.new_int_var(0, max(period - 1, 0), "") for _ in blocks]
    turn = [model.new_int_var(0, turns, "") for _ in blocks]
    peak = model.new_int_var(0, memory_bytes, "")
    span = model.new_int_var(0, period * (turns + 2), "")
    for n, block in enumerate(blocks):
        model.add(starts[n] == period * turn[n] + phase[n])
        model.add(span >= starts[n] + block.duration)
        for needed, gap in block.needs:
            model.add(starts[n] >= starts[needed] + blocks[needed].duration + gap)
    model.add(starts[0] < period)
    for rank in range(ticks.ranks):
        own = ticks.on(rank)
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(phase[n] + shift, blocks[n].duration, "")
                for n in own
                if blocks[n].duration
                for shift in (0, period)
            ]
        )
        holding = [n for n in own if blocks[n].held > 0]
        freeing = [n for n in own if blocks[n].held < 0]

        def until(event: Any, moment: Any) -> Any:
            """Whether an event, in ticks of a period, is not after a moment."""
            literal = model.new_bool_var("")
            model.add(event <= moment).only_enforce_if(literal)
            model.add(event > moment).only_enforce_if(literal.negated())
            return literal

        # What is held changes upwards at starts of forwards alone. Of block n, so many have
        # started by a moment of period q: q - turn + [phase <= moment].
        for each in holding:
            terms = [
                blocks[n].held * ((1 if n == each else until(phase[n], phase[each])) - turn[n])
                for n in holding
            ]
            for n in freeing:
                end = phase[n] + blocks[n].duration
                passed = until(end, phase[each]) + until(end - period, phase[each]) - 1
                terms.append(blocks[n].held * (passed - turn[n]))
            model.add(sum(terms) <= peak)
    return model, peak, span, starts
