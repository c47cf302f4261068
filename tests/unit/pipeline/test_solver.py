"""The solver's limits, and that it is missed by name."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from bytesched.errors import PluginError
from bytesched.pipeline.search import search
from bytesched.pipeline.solver import Budget, Solution, Verdict, cp_model, solve
from bytesched.pipeline.stages import Pipeline, Stage


def test_a_missing_solver_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PluginError, match=r"pip install 'bytesched\[pipeline\]'"):
        search(Pipeline((Stage(1, 1, 1),) * 2, (0, 1)), 2)


def test_what_has_no_solution() -> None:
    model = cp_model().CpModel()
    chain = [model.new_int_var(0, 1, "") for _ in range(3)]
    for one, other in pairwise(chain):
        model.add(one < other)
    assert solve(model, Budget(60), 1.0) is Verdict.IMPOSSIBLE


def test_a_solution_with_its_proof() -> None:
    model = cp_model().CpModel()
    one, other = (model.new_int_var(0, 9, "") for _ in range(2))
    model.add(one + other >= 11)
    model.minimize(2 * one + other)
    found = solve(model, Budget(60), 1.0)
    assert isinstance(found, Solution)
    assert (found.objective, found.bound, found.optimal) == (13, 13, True)
    assert (found.value(one), found.value(other)) == (2, 9)


def test_a_budget_that_is_spent_solves_nothing_and_says_so() -> None:
    budget = Budget(0.0)
    assert solve(cp_model().CpModel(), budget, 1.0) is Verdict.UNKNOWN
    assert budget.cut_short
