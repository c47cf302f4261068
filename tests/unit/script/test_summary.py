"""The line at the end of a script."""

from __future__ import annotations

from bytesched.plugins.script.summary import summary

FIGURES: dict[str, int | float | str] = {
    "mode": "cross",
    "barrier_crossed_pct": 3.4,
    "exposed_comm_ms": 12.34,
    "steps": 500,
    "reason": "",
}


def test_what_was_wrapped() -> None:
    assert summary([FIGURES], []) == [
        "mode cross: 3 % of the bytes crossed the barrier, 12.3 ms waited per step, 500 steps"
    ]
    (line,) = summary([{**FIGURES, "reason": "step(closure)"}], ["another was left"])
    assert line.endswith("500 steps: step(closure)")


def test_what_was_not() -> None:
    assert summary([], []) == []
    assert summary([{"mode": "plain"}], ["one: no step", "two: join()"]) == [
        "mode plain: one: no step; two: join()"
    ]
