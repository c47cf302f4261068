"""The table and the picture of a plan."""

from __future__ import annotations

from pathlib import Path

from bytesched.pipeline.replay import Timeline, replay
from bytesched.pipeline.report import draw, lines
from bytesched.pipeline.search import search
from bytesched.pipeline.stages import Link, Pipeline, Stage
from bytesched.plugins.pipelines.orders import torch_order

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
