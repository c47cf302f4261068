"""OR-tools' CP-SAT: imported when a search begins, on one thread, within limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bytesched.errors import PluginError

#: of the solver's own measure of work, which is about seconds of a slow core
_WORK_PER_S = 0.7


def cp_model() -> Any:
    """The module of CP-SAT. Raises ``PluginError`` that names the extra if it is missing."""
    try:
        from ortools.sat.python import cp_model as module
    except ImportError as error:
        raise PluginError("the search needs OR-tools: pip install 'bytesched[pipeline]'") from error
    return module


class OutOfTimeError(Exception):
    """A model is not built to its end: no time would be left to solve it."""


@dataclass
class Budget:
    """The time that all phases of a search share."""

    limit_s: float
    clock: Callable[[], float] = time.monotonic
    #: what it takes to judge an order, which comes after the last solution
    reserve_s: float = 0.0
    #: the clock, not the work done, ended a phase: another run may find another order
    cut_short: bool = False
    _start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._start_s = self.clock()

    @property
    def left_s(self) -> float:
        """Seconds until everything has to be over but judging what was found."""
        return max(0.0, self.limit_s - self.reserve_s - (self.clock() - self._start_s))

    def check(self) -> None:
        """Raises ``OutOfTimeError`` if nothing is left; for those who build large models."""
        if self.left_s == 0:
            self.cut_short = True
            raise OutOfTimeError


@dataclass(frozen=True)
class Solution:
    """What the solver found."""

    #: value of a variable
    value: Any
    objective: int
    bound: int
    optimal: bool


class Verdict(Enum):
    """Why there is no solution."""

    IMPOSSIBLE = "proved: there is none"
    UNKNOWN = "none was found within the limits"


def solve(model: Any, budget: Budget, share: float) -> Solution | Verdict:
    """Solve within a share of the budget.

    Work is counted rather than timed, so that a run repeats itself; the clock is the last resort.
    """
    cp = cp_model()
    left_s = budget.left_s
    if left_s < 0.01:
        budget.cut_short = True
        return Verdict.UNKNOWN
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = share * budget.limit_s * _WORK_PER_S
    solver.parameters.max_time_in_seconds = left_s
    status = solver.solve(model)
    if budget.left_s <= 0.0:
        budget.cut_short = True
    if status == cp.INFEASIBLE:
        return Verdict.IMPOSSIBLE
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return Verdict.UNKNOWN
    return Solution(
        solver.value,
        round(solver.objective_value),
        round(solver.best_objective_bound),
        status == cp.OPTIMAL,
    )
