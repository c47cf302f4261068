"""The repetend: what all ranks do again and again while micro-batches keep coming.

Modulo scheduling (Rau, MICRO 1994) of the blocks of one micro-batch, where Tessel (Lin et al., HPCA
2024) enumerates: a block starts at ``period * turn + phase``, and no two blocks of a rank overlap
modulo the period. Crossings between ranks take their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bytesched.pipeline.order import Kind
from bytesched.pipeline.solver import Budget, OutOfTimeError, Verdict, cp_model, solve
from bytesched.pipeline.ticks import Ticks

#: of the time of all: of a try whether there is one of a period, and of making that better
_TRY_SHARE = 0.06
_BETTER_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Repetend:
    """A micro-batch starts every ``period``; each of its blocks at its own time after that."""

    period: int
    starts: tuple[int, ...]
    #: bytes on the fullest rank once micro-batches keep coming
    memory_bytes: int
    #: none within the memory has a shorter period
    shortest: bool
    #: no repetend of the period holds less
    proved: bool
    #: ranks never idle for want of work: the busiest one always computes
    full: bool


class _Pattern(NamedTuple):
    starts: tuple[int, ...]
    memory_bytes: int
    optimal: bool


def repetend(ticks: Ticks, memory_bytes: int, budget: Budget, share: float) -> list[Repetend]:
    """The one that holds least of those with the least period, and the shortest within memory."""
    period, pattern, shortest = _least(ticks, memory_bytes, budget, share * _TRY_SHARE)
    full = period == max(ticks.work(rank) for rank in range(ticks.ranks))

    def better(of: str, limit: int) -> _Pattern | Verdict:
        part = share * _BETTER_SHARE
        return _pattern(ticks, period, limit, budget, part, of, pattern.starts)

    leanest = better("peak", memory_bytes)
    proved = not isinstance(leanest, Verdict) and leanest.optimal
    if isinstance(leanest, Verdict):
        leanest = pattern._replace(optimal=False)
    found = [Repetend(period, *leanest[:2], shortest, proved, full)]
    for limit in dict.fromkeys((leanest.memory_bytes, memory_bytes)):
        brief = better("span", limit)
        if not isinstance(brief, Verdict):
            least_held = proved and brief.memory_bytes == leanest.memory_bytes
            found.append(Repetend(period, *brief[:2], shortest, least_held, full))
    return found


def _least(
    ticks: Ticks, memory_bytes: int, budget: Budget, share: float
) -> tuple[int, _Pattern, bool]:
    """The least period for which there is a pattern, that, and whether it is proved least.

    With a longer period there is always one too: a pause at its end does no harm. So the interval
    between a period with none and one with a pattern is halved. Where the limits end a try, it goes
    on as if there were no pattern, and proves nothing.
    """
    low = proved = ticks.period(memory_bytes)
    longest = sum(block.duration + sum(gap for _, gap in block.needs) for block in ticks.blocks)
    high, found = low, _packed(ticks, low, memory_bytes)
    while found is None:
        high = min(max(high + 1, high * 102 // 100), longest) if budget.left_s else longest
        found = _packed(ticks, high, memory_bytes)
    period = low
    while low < high:
        pattern = _pattern(ticks, period, memory_bytes, budget, share)
        if not isinstance(pattern, Verdict):
            high, found = period, pattern
        else:
            low = period + 1
            if pattern is Verdict.IMPOSSIBLE:
                proved = low
        period = (low + high) // 2
    return high, found, proved == high


def _packed(ticks: Ticks, period: int, memory_bytes: int) -> _Pattern | None:
    """The pattern of blocks that are put, one by one, to where each is first possible.

    There is one once a period is long enough for a micro-batch from its start to its end.
    """
    blocks = ticks.blocks
    starts = [0] * len(blocks)
    placed: list[list[int]] = [[] for _ in range(ticks.ranks)]
    for n in sorted(range(len(blocks)), key=lambda n: blocks[n].kind is Kind.WEIGHT_GRADIENT):
        block = blocks[n]
        ready = start = max(
            (starts[needed] + blocks[needed].duration + gap for needed, gap in block.needs),
            default=0,
        )
        others = placed[block.rank] if block.duration else []
        while moves := [
            blocks[other].duration + after
            for other in others
            for after in [(starts[other] - start) % period]
            if after < block.duration or after + blocks[other].duration > period
            for after in [after if after < block.duration else after - period]
        ]:
            start += max(moves)
            if start > ready + period:
                return None
        starts[n] = start
        if block.duration:
            others.append(n)
    peak = max(_peak(ticks, rank, starts, period) for rank in range(ticks.ranks))
    return _Pattern(tuple(starts), peak, False) if peak <= memory_bytes else None


def _peak(ticks: Ticks, rank: int, starts: Sequence[int], period: int) -> int:
    """The most that a rank holds once micro-batches keep coming: at the start of a forward."""
    own = [n for n in ticks.on(rank) if ticks.blocks[n].held]
    changes = [
        (starts[n] + (ticks.blocks[n].duration if held < 0 else 0), held)
        for n in own
        for held in [ticks.blocks[n].held]
    ]
    return max(
        (
            sum(held * ((moment - when) // period) for when, held in changes)
            for moment, _ in changes
        ),
        default=0,
    )


def _pattern(
    ticks: Ticks,
    period: int,
    memory_bytes: int,
    budget: Budget,
    share: float,
    of: str = "",
    hint: Sequence[int] = (),
) -> _Pattern | Verdict:
    """Any pattern of a period, or that of the least peak or span."""
    try:
        model, peak, span, starts = _model(ticks, period, memory_bytes, budget)
    except OutOfTimeError:
        return Verdict.UNKNOWN
    if of:
        model.minimize(peak if of == "peak" else span)
    for start, time in zip(starts, hint, strict=False):
        model.add_hint(start, time)
    solution = solve(model, budget, share)
    if isinstance(solution, Verdict):
        return solution
    times = tuple(solution.value(start) for start in starts)
    return _Pattern(times, solution.value(peak), solution.optimal)


def _model(
    ticks: Ticks, period: int, memory_bytes: int, budget: Budget
) -> tuple[Any, Any, Any, list[Any]]:
    """The model, the variables for peak and span, and those of the starts.

    Raises ``OutOfTimeError``.
    """
    model = cp_model().CpModel()
    blocks = ticks.blocks
    turns = len(blocks)
    starts = [model.new_int_var(0, period * (turns + 1), "") for _ in blocks]
    phase = [model.new_int_var(0, max(period - 1, 0), "") for _ in blocks]
    turn = [model.new_int_var(0, turns, "") for _ in blocks]
    peak = model.new_int_var(0, memory_bytes, "")
    span = model.new_int_var(0, period * (turns + 2), "")
    for n, block in enumerate(blocks):
        budget.check()
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
            budget.check()
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
