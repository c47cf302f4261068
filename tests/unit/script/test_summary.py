"""The line at the end of a script."""

from __future__ import annotations

from bytesched.plugins.script.summary import summary

FIGURES: dict[str, int | float | str] = {
    "model": "Net",
    "mode": "cross",
    "comm_ms": 98.0,
    "overlap_pct": 62.2,
    "barrier_crossed_pct": 3.4,
    "iterations": 500,
    "steps": 1001,
    "reason": "",
}


def test_what_was_wrapped() -> None:
    assert summary([FIGURES], []) == [
        "mode cross: hid 61 of 98 ms of communication per iteration (62 %), 3 % of the bytes "
        "crossed the barrier, 500 iterations"
    ]
    (line,) = summary([{**FIGURES, "reason": "step(closure)"}], [])
    assert line.endswith("500 iterations: step(closure)")


def test_nothing_is_said_of_what_was_not_measured() -> None:
    short = {**FIGURES, "iterations": 0, "comm_ms": 0.0, "overlap_pct": 0.0}
    assert summary([short], []) == ["mode cross: too short to say what it brought"]
    (line,) = summary([{**FIGURES, "comm_ms": 0.0}], [])
    assert line == "mode cross: 3 % of the bytes crossed the barrier, 500 iterations"


def test_several_models_are_named() -> None:
    lines = summary([FIGURES, {**FIGURES, "model": "Critic"}, FIGURES], [])
    assert [line.partition(":")[0] for line in lines] == ["Net 1", "Critic", "Net 2"]


def test_what_was_not() -> None:
    assert summary([], []) == []
    assert summary([{"mode": "plain"}], ["one: no step", "two: join()"]) == [
        "mode plain: one: no step",
        "mode plain: two: join()",
    ]


def test_what_was_and_what_was_not() -> None:
    wrapped, left = summary([FIGURES], ["Critic: join()"])
    assert wrapped.startswith("Net: mode cross: ")
    assert left == "mode plain: Critic: join()"
