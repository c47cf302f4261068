"""`bytesched sim`: what it refuses, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytesched.commands import sim


def said(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert sim.main(arguments.split()) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--profile gtp", "did you mean gpt"),
        ("--ranks 1", "from 2 to 4096"),
        ("--ranks two", "expected from 2"),
        ("--systems ddp,horovod", "'horovod'"),
        ("--systems ddp-best:units=3", "ddp-best has no options"),
        ("--systems fsdp2", "'fsdp2'"),
        ("--systems bytesched:bucket_mb=1", "'bucket_mb'"),
        ("--systems bytesched:partition_bytes=big", "not a size"),
        ("--systems bytesched:order=replay", "'order'"),
        ("--systems bytesched:policy=none", "no policy"),
        ("--systems ddp:bucket_mb=0", "above 0"),
        ("--latency-us 0", "expected from"),
        ("--cores-per-rank 0", "expected from"),
        ("--cpu-load=-1", "expected from"),
        ("--backend auto", "invalid choice"),
        ("--systems ddp:bucket_view=perhaps", "bucket_view"),
        ("--rate fast", "for example 1gbit"),
        ("--rat 1gbit --backen=mpi --latncy-us 1", "did you mean --latency-us?"),
        ("--bandwidth 1gbit", "--bandwidth is gone: it is --rate"),
        ("--jitter=3%", "--jitter is gone: ranks are alike"),
        ("--json nowhere/there.json", "no such folder"),
        ("--share", "--share is gone: what was predicted"),
        ("--profile moe", "measure them, bytesched bench --lab 2 --emulate moe"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        sim.main(arguments.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_it_pays_where_communication_takes_as_long_as_compute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    systems = "ddp,ddp-best,bytesched"
    text = said(
        f"--ranks 2,16 --rate 950mbit --systems {systems} --json {file}",
        capsys,
    )
    assert "2 ranks: yes, bytesched takes" in text
    assert "assumed: 0.95 Gbit/s" in text
    titles = next(line for line in text.splitlines() if line.lstrip().startswith("ranks  system"))
    explained = text.partition(titles)[2]
    for title in ("size", "x T*", "vs best", "collectives"):
        assert title in titles
        assert title in explained, title
    predictions = json.loads(file.read_text())["predictions"]
    assert [one["ranks"] for one in predictions] == [2] * 3 + [16] * 3
    by_system = {one["system"]: one for one in predictions[:3]}
    assert by_system["ddp"]["iteration_s"] >= by_system["ddp-best"]["iteration_s"]
    assert all(one["to_optimum"] >= 1.0 for one in predictions)


def test_it_does_not_pay_where_communication_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    text = said("--profile resnet --ranks 2 --rate 1000gbit --latency-us 1", capsys)
    assert "2 ranks: no gain here, " in text
    assert "hides behind backward" in text


def test_few_cores_are_said_and_cost_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ours_s(arguments: str) -> float:
        file = tmp_path / "found.json"
        systems = "--profile resnet --systems ddp,bytesched"
        text = said(f"--ranks 4 --rate 1gbit {systems} --json {file} {arguments}", capsys)
        assert ("0.5 cores for each rank" in text) == bool(arguments)
        assert "Infinity" not in file.read_text()
        content = json.loads(file.read_text())
        assert bool(content["costs"]["scheduled"]["message_s"]) == bool(arguments)
        return float(content["predictions"][1]["iteration_s"])

    assert ours_s("--cores-per-rank 0.5") > 1.03 * ours_s("")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "halving by size as in MPI"),
        ("--backend gloo", "ring, which is all that Gloo has"),
        ("--backend tree", "a message; tree, of which the start hides"),
        ("--backend nccl", "as in NCCL, of which the start does not hide"),
    ],
)
def test_how_all_reduces_run_is_said(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(f"--profile resnet --ranks 32 --systems ddp {arguments}", capsys)
    assert words in text
