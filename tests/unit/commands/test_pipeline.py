"""`bytesched pipeline plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bytesched.cli import main
from bytesched.pipeline.order import Order

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
    options = ["--split-backward", "--csv", str(path), "--png", str(tmp_path / "order.png")]
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
    assert plan("--memory", "1KiB", "--csv", str(path), activation_bytes=1024) == 1
    assert "holds 2048 bytes" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--placement", "x"], "torch puts a stage on one rank"),
        (["--placement", "none.json"], "placement none.json: No such file"),
        (["--memory", "1MiB"], "no stage holds activations"),
        (["--ranks", "0"], "--ranks: 0: expected from 1 to 64"),
        (["--profile", "vgg", "--memory", "1MiB"], "in a profile that lists stages"),
        (["--profile", "gtp"], "did you mean gpt"),
        (["--activation", "1MiB"], "--activation is gone: --profile takes a file with a list"),
        (["--microbatches=4"], "--microbatches is gone: it is --micro-batches"),
        (["--csv", "/none/order.csv"], "there is no such folder"),
        (["--csv", "/"], "--csv: /: it is a folder"),
    ],
)
def test_what_it_refuses(
    options: list[str],
    told: str,
    plan: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(*options)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_what_cannot_be_written_is_told(
    plan: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(order: Order, path: str) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(Order, "write", full)
    assert plan("--csv", str(tmp_path / "order.csv")) == 1
    assert "order.csv: No space left on device" in capsys.readouterr().err
