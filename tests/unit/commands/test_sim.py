"""`bytesched sim`: what it refuses, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import TINY_TO_SEND

from bytesched.commands import sim
from bytesched.sim import picture


def said(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert sim.main(arguments.split()) == 0
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
        ("--systems bytesched:order=replay", "'order'"),
        ("--systems bytesched:policy=none", "no policy"),
        ("--systems ddp:bucket_mb=0", "above 0"),
        ("--jitter x", "a share"),
        ("--straggler x:3%", "a rank"),
        ("--ranks 4,8 --straggler 4:3%", "no such rank among 4"),
        ("--curve ranks --ranks 8 --straggler 4:3%", "no such rank among 2"),
        ("--ranks 8 --straggler 4:3% --png map.png", "no such rank among 2"),
        ("--latency-us 0", "a positive number"),
        ("--cores-per-rank 0", "a positive number"),
        ("--cpu-load -1", "a positive number"),
        ("--backend auto", "invalid choice"),
        ("--systems ddp:bucket_view=yes", "bucket_view"),
        ("--bandwidth fast", "for example 1gbit"),
        ("--iterations 12", "at least 16"),
        ("--bandwith 1gbit", "did you mean --bandwidth?"),
        ("--json nowhere/there.json", "no such folder"),
        ("--share --curve ranks", "--curve is not for --share"),
        ("--share gtp", "did you mean gpt"),
        ("--share moe", "layers of experts"),
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
        f"--ranks 2,16 --bandwidth 950mbit --systems {systems} --json {file}",
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
    text = said("--profile resnet --ranks 2 --bandwidth 1000gbit --latency-us 1", capsys)
    assert "2 ranks: no gain here, " in text
    assert "hides behind backward" in text


def test_few_cores_are_said_and_cost_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ours_s(arguments: str) -> float:
        file = tmp_path / "found.json"
        systems = "--profile resnet --systems ddp,bytesched"
        text = said(f"--ranks 4 --bandwidth 1gbit {systems} --json {file} {arguments}", capsys)
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
        ("--algorithm tree", "a message; tree, of which the start hides"),
        ("--backend nccl", "as in NCCL, of which the start does not hide"),
    ],
)
def test_how_all_reduces_run_is_said(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(f"--profile resnet --ranks 32 --systems ddp {arguments}", capsys)
    assert words in text


@pytest.mark.nightly
def test_a_straggler_slows_all_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def times_s(arguments: str) -> list[float]:
        file = tmp_path / "found.json"
        text = said(f"--ranks 3 --profile resnet --json {file} {arguments}", capsys)
        assert ("the slowest rank, which computes 30 % longer" in text) == bool(arguments)
        return [one["iteration_s"] for one in json.loads(file.read_text())["predictions"]]

    for even_s, late_s in zip(times_s(""), times_s("--straggler 1:30%"), strict=True):
        assert late_s > 1.2 * even_s


@pytest.mark.nightly
def test_a_curve_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where communication is a tenth of compute nothing is gained; where it is as much, most is."""
    pytest.importorskip("matplotlib")
    file = tmp_path / "curve.png"
    text = said(
        f"--profile vgg --ranks 2 --curve ratio --systems ddp,bytesched --png {file}", capsys
    )
    gains = {
        float(line.split()[0]): float(line.split()[-1].rstrip("x"))
        for line in text.splitlines()
        if line.endswith("x")
    }
    assert gains[0.1] < 1.05
    assert max(gains, key=lambda ratio: gains[ratio]) == pytest.approx(1.0, abs=0.3)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_where_it_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(picture, "_MAP_RANKS", (2, 4))
    file, profile = tmp_path / "map.png", tmp_path / "tiny.json"
    profile.write_text(json.dumps(TINY_TO_SEND))
    arguments = f"--profile {profile} --ranks 2 --systems ddp,bytesched --png {file}"
    assert sim.main(arguments.split()) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_jobs_that_share_are_as_fast_as_their_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, tiny = tmp_path / "share.json", tmp_path / "tiny.json"
    tiny.write_text(json.dumps(TINY_TO_SEND))
    text = said(f"--profile {tiny} --ranks 2 --bandwidth 1gbit --share vgg --json {path}", capsys)
    assert "one after the other" in text
    (found,) = json.loads(path.read_text())["predictions"]
    assert found["ranks"] == 2
    assert len(found["jobs"]) == 2
    assert found["jobs"][1]["compute_s"] > found["jobs"][0]["compute_s"]
