"""What the doctor says of a script's waits."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytesched.doctor.advice import ADVICE, advice_for
from bytesched.doctor.explain import report
from bytesched.plugins.script.explained import Wait, _of_host

FIGURES = {
    "mode": "cross",
    "barrier_crossed_pct": 3.0,
    "comm_ms": 16.0,
    "overlap_pct": 25.0,
    "iterations": 10,
    "steps": 20,
}


def wait(kind: str, line: int, names_ms: dict[str, float], asks: str = "") -> Wait:
    return Wait(asks, f"train.py:{line}", kind, defaultdict(float, names_ms))


CLIPPED = wait("norms", 88, {"norm of all gradients": 90.0}, "clip_grad_norm_")


@pytest.mark.parametrize("advice", ADVICE, ids=lambda advice: advice.pattern)
def test_each_reason_that_is_shown_finds_its_own_advice(advice: object) -> None:
    assert advice_for(advice.shown.strip("`")) is advice  # type: ignore[attr-defined]


def test_longest_waits_are_told_with_their_line_and_a_cure() -> None:
    read, flushed = wait("gradients", 90, {"fc.weight": 29.0}), wait("updates", 95, {"flush": 1.0})
    waits = [CLIPPED, read, flushed]
    lines = report([{**FIGURES, "reason": "cross_barrier is off"}], [], waits)
    assert lines[0].startswith("mode cross: hid 4.0 of 16 ms of communication per iteration (25 %)")
    assert [line for line in lines if "per iteration," in line[:25]] == [
        "9.0 ms per iteration, 75 % of all: "
        "clip_grad_norm_ asks for norms of all gradients (train.py:88)",
        "2.9 ms per iteration, 24 % of all: the script reads gradients of fc.weight (train.py:90)",
    ]
    assert "little crossed: cross_barrier is off" in lines
    assert sum(line.startswith("    do: ") for line in lines) == 3


def test_reason_of_a_line_that_is_told_of_is_not_said_again() -> None:
    reason = "clip_grad_norm_ asks for norms of all gradients (train.py:88)"
    told = report([{**FIGURES, "reason": reason}], [], [CLIPPED])
    assert not any(line.startswith("little") for line in told)


@pytest.mark.parametrize(
    "kind", ["gradients", "weights", "parameters", "step", "backward", "updates", "norms"]
)
def test_many_names_are_counted(kind: str) -> None:
    waited = wait(kind, 1, {f"layer{n}": 9.0 - n for n in range(5)})
    (line,) = [line for line in report([FIGURES], [], [waited]) if "% of all" in line]
    named = kind in ("gradients", "weights", "parameters")
    assert ("layer0, layer1, layer2 and 2 more" in line) is named


def test_what_was_not_wrapped_is_told() -> None:
    lines = report([], ["DDP of Net: step() was compiled"], [])
    assert lines == ["mode plain: DDP of Net: step() was compiled"]


@pytest.mark.parametrize(
    ("device", "comm_ms", "is_told"),
    [("cuda", 3.0, True), ("cuda", 4.0, False), ("cuda", 0.0, False), ("cpu", 3.0, False)],
)
def test_a_gpu_that_waits_for_its_host_is_told_of(
    device: str, comm_ms: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """148 tensors in a chunk are 3,020 calls."""
    monkeypatch.setattr("bytesched.link.host.call_s", lambda: 1e-6)
    slot = SimpleNamespace(parameter=SimpleNamespace(device=torch.device(device)))
    figures = {"chunks": 1, "comm_ms": comm_ms}
    session: Any = SimpleNamespace(slots=[slot] * 148, stats=lambda: figures)
    assert ("3.02 ms of each iteration" in _of_host(session)) is is_told
