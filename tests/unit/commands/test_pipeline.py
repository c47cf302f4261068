"""`bytesched pipeline plan`: what it prints, draws, writes and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bytesched.cli import main
from bytesched.pipeline.order import Order
from bytesched.pipeline.replay import Timeline, replay
from bytesched.pipeline.report import draw, lines
from bytesched.pipeline.search import search
from bytesched.pipeline.stages import Link, Pipeline, Stage
from bytesched.plugins.pipelines.orders import torch_order

STAGE = {"forward_s": 1e-3, "backward_s": 2e-3}


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., int]:
    """The command on four stages that are alike."""

    def run(*options: str, **sizes: int) -> int:
        profile = tmp_path / "stages.json"
        profile.write_text(json.dumps({"stages": [STAGE | sizes] * 4}))
        given = f"--profile {profile} --latency-us 0 --micro-batches 4 --ranks 2 --time-limit-s 5"
        return main(["pipeline", "plan", *given.split(), *options])

    return run


def test_a_plan_is_printed_and_written(
    plan: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "order.csv"
    options = ["--split-backward", "-o", str(path), "-o", str(tmp_path / "order.png")]
    assert plan(*options, activation_bytes=1024) == 0
    printed = capsys.readouterr().out
    assert Order.read(path).stage_ranks == (0, 1, 1, 0)
    assert (tmp_path / "order.png").read_bytes().startswith(b"\x89PNG")
    for name in ("planned", "1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        assert name in printed
    assert "proved" in printed
    assert "counted as nothing: output_bytes, parameter_bytes\n" in printed


def test_too_little_memory_writes_nothing(
    plan: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "order.csv"
    with pytest.raises(SystemExit, match="2"):
        plan("--memory", "1KiB", "-o", str(path), activation_bytes=1024)
    assert "holds 2048 bytes" in capsys.readouterr().err
    assert not path.exists()


def test_what_cannot_be_written_is_told(
    plan: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(order: Order, path: str) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(Order, "write", full)
    assert plan("-o", str(tmp_path / "order.csv")) == 1
    assert "No space left on device: '/tmp" in capsys.readouterr().err


PIPELINE = Pipeline((Stage(0.001, 0.001, 0.001, 1024, 50, 100),) * 2, (0, 1), Link(1e5), 2)


def test_what_a_plan_says() -> None:
    found = search(PIPELINE, 4, memory_bytes=2048, time_limit_s=60)
    others: dict[str, Timeline | str] = {
        "GPipe": replay(torch_order("GPipe", 2, 1, 4), PIPELINE),
        "ZBV": "ZBV is for two stages on a rank",
    }
    text = list(lines(found, others, 2048))
    planned = next(line for line in text if line.startswith("planned")).split()
    assert planned[1] == f"{found.timeline.end_s * 1e3:.2f}"
    assert planned[-1] == "1.00x"
    assert any(line.startswith("GPipe *") and "4 KiB" in line for line in text)
    assert "* holds more than --memory allows." in text
    assert "ZBV is for two stages on a rank" in text
    assert any(line.startswith("proved: no order") for line in text)


def test_what_is_not_proved_is_said() -> None:
    found = search(PIPELINE, 32, time_limit_s=0.001)
    text = "\n".join(lines(found, {}, None))
    assert "not proved: no order ends before" in text
    assert "the time limit ended the search" in text


def test_a_picture_has_a_bar_for_everything(tmp_path: Path) -> None:
    for replicas in (1, 2):
        pipeline = Pipeline(PIPELINE.stages, (0, 1), Link(1e5), replicas)
        draw(replay(torch_order("1F1B", 2, 1, 4), pipeline), "plan", tmp_path / f"{replicas}.png")
    one, two = ((tmp_path / f"{n}.png").read_bytes() for n in (1, 2))
    assert one.startswith(b"\x89PNG")
    assert one != two
