"""Jitter that a timeline has recorded."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bytesched.commands.report import main as report
from bytesched.commands.sim import main
from bytesched.sim.recorded import recorded_jitter
from bytesched.trace.timeline import Timeline


def recorded(folder: Path, rank: int, paces: list[float]) -> None:
    timeline = Timeline(folder, rank=rank)
    now_ns = 0
    for step, pace in enumerate(paces):
        end_ns = now_ns + round(1e7 * pace)
        timeline.on_span("backward", "backward", now_ns, end_ns)
        timeline.on_step(step, end_ns)
        now_ns = end_ns
    timeline.close()


def test_the_jitter_of_ranks_of_different_pace(tmp_path: Path) -> None:
    chance = random.Random(0)
    for rank, pace in enumerate((1.0, 1.5)):
        # What comes first is not of the same kind.
        paces = [9.0, 5.0, *(pace * chance.lognormvariate(0.0, 0.1) for _ in range(400))]
        recorded(tmp_path, rank, paces)
    merged = tmp_path / "run.json"
    assert report([str(tmp_path), "-o", str(merged)]) == 0
    assert recorded_jitter(merged) == pytest.approx(0.1, rel=0.1)


def test_the_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, 0, [1.0, 1.0, *(1.0, 1.1) * 4])
    arguments = ["--profile", "resnet", "--ranks", "2", "--systems", "ddp", "--iterations", "16"]
    assert main([*arguments, "--jitter", str(tmp_path / "rank0.trace.json")]) == 0
    assert "16 iterations, jitter 5.1 %" in capsys.readouterr().out


def test_a_timeline_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, 0, [1.0] * 9)
    with pytest.raises(SystemExit):
        main(["--jitter", str(tmp_path / "rank0.trace.json")])
    assert "rank 0 has 7 backward passes after the first 2" in capsys.readouterr().err
