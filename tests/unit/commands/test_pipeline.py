"""`bytesched pipeline plan`: what it prints, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytesched.cli import main
from bytesched.pipeline.order import Order

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
