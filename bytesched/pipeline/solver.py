"""OR-tools' CP-SAT: imported when a search begins, on one thread, within limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from bytesched.errors import PluginError

__all__ = ["Budget", "Solution", "cp_model", "solve"]

#: of the solver's own measure of work, which is about seconds of a slow core
_WORK_PER_S = 0.7


def cp_model() -> Any:
    """The module of CP-SAT. Raises ``PluginError`` that names the extra if it is missing."""
    try:
        from ortools.sat.python import cp_model as module
    except ImportError as error:
        raise PluginError("the search needs OR-tools: pip install 'bytesched[pipeline]'") from error
    return module


@dataclass
class Budget:
    """The time that all phases of a search share."""

    limit_s: float
    #: the clock, not the work done, ended a phase: another run may find another order
    cut_short: bool = False
    _start_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until everything has to be over."""
        return max(0.0, self.limit_s - (time.monotonic() - self._start_s))


@dataclass(frozen=True)
class Solution:
    """What the solver found."""

    #: value of a variable
    value: Any
    objective: int
    bound: int
    optimal: bool


def solve(model: Any, budget: Budget, share: float) -> Solution | None:
    """Solve within a share of the budget; None if there is no solution, or none was found.

    Work is counted rather than timed, so that a run repeats itself; the clock is the last resort.
    """
    cp = cp_model()
    left_s = budget.left_s
    if left_s < 0.01:
        budget.cut_short = True
        return None
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = share * budget.limit_s * _WORK_PER_S
    solver.parameters.max_time_in_seconds = left_s
    status = solver.solve(model)
    if budget.left_s <= 0.0:
        budget.cut_short = True
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return None
    return Solution(
        solver.value,
        round(solver.objective_value),
        round(solver.best_objective_bound),
        status == cp.OPTIMAL,
    )
