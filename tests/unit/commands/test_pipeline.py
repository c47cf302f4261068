"""`bytesched pipeline plan`: what it prints, draws, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytesched.cli import main
from bytesched.pipeline.order import Order
from bytesched.pipeline.replay import Timeline, replay
from bytesched.pipeline.report import draw, lines
from bytesched.pipeline.search import search
from bytesched.pipeline.stages import Link, Pipeline, Stage
from bytesched.plugins.pipelines.orders import torch_order

SMALL = ["--forward-ms", "1", "--backward-ms", "2", "--latency-us", "0", "--microbatches", "4"]


def plan(*options: str) -> int:
    return main(["pipeline", "plan", *SMALL, "--ranks", "2", "--time-limit-s", "5", *options])


def test_a_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "order.csv"
    options = ["--activation", "1KiB", "--split-backward", "--csv", str(path)]
    assert plan(*options, "--png", str(tmp_path / "order.png")) == 0
    printed = capsys.readouterr().out
    assert Order.read(path).stage_ranks == (0, 1, 1, 0)
    assert (tmp_path / "order.png").read_bytes().startswith(b"\x89PNG")
    for name in ("planned", "1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        assert name in printed
    assert "proved" in printed
    assert "counted as nothing: output_bytes, parameter_bytes\n" in printed


def test_too_little_memory_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "order.csv"
    assert plan("--activation", "1KiB", "--memory", "1KiB", "--csv", str(path)) == 1
    assert "holds 2048 bytes" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--placement", "x"], "torch puts a stage on one rank"),
        (["--placement", "none.json"], "placement none.json: No such file"),
        (["--memory", "1MiB"], "no stage holds activations"),
        (["--ranks", "0"], "--ranks 0: from 1 to 64"),
        (["--profile", "vgg"], "--forward-ms beside --profile: the profile says that of its"),
        (["--csv", "/none/order.csv"], "there is no such folder"),
        (["--csv", "/"], "--csv /: it is a folder"),
    ],
)
def test_what_it_refuses(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(*options)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--profile", "vgg", "--memory", "1MiB"], "in a profile that lists stages"),
        (
            ["--profile", "vgg", "--activation", "1MiB"],
            "--activation beside --profile: the profile",
        ),
        (["--profile", "vgg", "--output", "0"], "--output beside --profile"),
        (["--profile", "gtp"], "did you mean gpt"),
        ([], "expected --profile, or --forward-ms and --backward-ms"),
        (["--forward-ms", "1"], "--backward-ms None: of a stage, above 0"),
        (["--activation", "1MiB"], "expected --profile, or --forward-ms"),
    ],
)
def test_what_says_nothing_or_too_much_of_the_stages(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", "plan", *options])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_what_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(order: Order, path: str) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(Order, "write", full)
    assert plan("--csv", str(tmp_path / "order.csv")) == 1
    assert "order.csv: No space left on device" in capsys.readouterr().err


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
