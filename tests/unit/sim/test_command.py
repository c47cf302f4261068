"""`bytesched sim`: what it refuses, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytesched.sim import command


def said(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert command.main(arguments.split()) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--profile gtp", "did you mean gpt"),
        ("--ranks 1", "from 2 to"),
        ("--ranks two", "from 2 to"),
        ("--systems ddp,horovod", "'horovod'"),
        ("--systems fsdp2:units=3", "fsdp2 has no options"),
        ("--systems bytesched:bucket_mb=1", "'bucket_mb'"),
        ("--systems bytesched:partition_bytes=big", "not a size"),
        ("--systems bytesched:order=none", "order"),
        ("--systems bytesched:policy=none", "no policy"),
        ("--systems ddp:bucket_mb=0", "no size"),
        ("--jitter x", "a share"),
        ("--straggler x:3%", "a rank"),
        ("--latency-us 0", "a positive number"),
        ("--bandwidth fast", "for example 1gbit"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command.main(arguments.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_it_pays_where_communication_takes_as_long_as_compute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    systems = "ddp,ddp-best,bytesched"
    text = said(
        f"--ranks 2,16 --bandwidth 950mbit --systems {systems} --json {file}",
        capsys,
    )
    assert "2 ranks: yes, bytesched is" in text
    assert "assumed: 950mbit" in text
    predictions = json.loads(file.read_text())["predictions"]
    assert [one["ranks"] for one in predictions] == [2] * 3 + [16] * 3
    by_system = {one["system"]: one for one in predictions[:3]}
    assert by_system["ddp"]["iteration_s"] >= by_system["ddp-best"]["iteration_s"]
    assert all(one["to_optimum"] >= 1.0 for one in predictions)
    assert by_system["bytesched"]["messages"] > 0


def test_it_does_not_pay_where_communication_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    text = said("--profile resnet --ranks 2 --bandwidth 1000gbit --latency-us 1", capsys)
    assert "2 ranks: no, " in text
    assert "hides behind backward" in text


def test_a_straggler_slows_all_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def times_s(arguments: str) -> list[float]:
        file = tmp_path / "found.json"
        said(f"--ranks 3 --profile resnet --json {file} {arguments}", capsys)
        return [one["iteration_s"] for one in json.loads(file.read_text())["predictions"]]

    for even_s, late_s in zip(times_s(""), times_s("--straggler 1:30%"), strict=True):
        assert late_s > 1.2 * even_s
