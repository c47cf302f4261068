"""One sentence: does it pay here, and why."""

from __future__ import annotations

from collections.abc import Sequence

from bytesched.sim.curve import Case
from bytesched.sim.predict import Prediction

__all__ = ["SCHEDULED", "gain", "rivals", "verdict"]

SCHEDULED = ("bytesched", "split")
#: less than that is within the noise of a measurement
_WORTH_IT = 1.02
#: from this multiple of T* on, what is lost is named
_NEAR = 1.03
#: where communication takes so many times as long as compute, or such a part of it
_MUCH, _LITTLE = 2.5, 0.5


def rivals(found: Sequence[Prediction]) -> tuple[Prediction | None, Prediction | None]:
    """The fastest of ours, and the fastest of the others; None where there is none."""
    ours = [one for one in found if one.system.startswith(SCHEDULED)]
    others = [one for one in found if not one.system.startswith(SCHEDULED)]
    least = [min(group, key=lambda one: one.iteration_s, default=None) for group in (ours, others)]
    return least[0], least[1]


def gain(found: Sequence[Prediction]) -> float:
    """How many times faster ours is than the best of the others; 1 if one is missing."""
    ours, other = rivals(found)
    return other.iteration_s / ours.iteration_s if ours and other else 1.0


def verdict(case: Case, found: Sequence[Prediction]) -> str:
    """The sentence about one number of ranks."""
    fabric = case.fabric
    ours, other = rivals(found)
    if ours is None or other is None:
        return ""
    possible = other.iteration_s / other.optimum_s
    times = gain(found)
    head = f"{fabric.ranks} ranks: "
    if possible < _WORTH_IT:
        return head + (
            f"no, {other.system} is within {100 * (possible - 1):.1f} % of what any schedule can "
            f"reach ({_why(case.ratio)})."
        )
    if times < _WORTH_IT:
        return head + (
            f"no, {ours.system} takes {1 / times:.2f} times as long as {other.system}"
            f"{_lost(case, ours)}."
        )
    return head + (
        f"yes, {ours.system} is {times:.2f} times as fast as {other.system}, of "
        f"{possible:.2f} that are possible: {_why(case.ratio)}{_lost(case, ours)}."
    )


def _why(ratio: float) -> str:
    text = f"communication takes {ratio:.2g} times as long as compute"
    if ratio < _LITTLE:
        return f"{text} and hides behind backward"
    if ratio > _MUCH:
        return f"{text}, of which no order can hide much"
    return text


def _lost(case: Case, ours: Prediction) -> str:
    if ours.to_optimum < _NEAR:
        return ""
    fabric = case.fabric
    slowest = case.climate.slowest(fabric.ranks, case.iterations)
    if slowest - 1 > (ours.to_optimum - 1) / 2:
        return (
            f"; it stays {100 * (ours.to_optimum - 1):.0f} % above T*, as all wait for the slowest "
            f"rank, which computes {100 * (slowest - 1):.0f} % longer"
        )
    start_up_ms = 1e3 * (fabric.start_up_s() or fabric.occupied_s(0))
    return (
        f"; it stays {100 * (ours.to_optimum - 1):.0f} % above T*, as each of its "
        f"{ours.collectives} collectives among {fabric.ranks} ranks takes {start_up_ms:.3g} ms "
        "to start"
    )
