"""`bytesched sim`: what it refuses, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


def test_it_pays_where_communication_takes_as_long_as_compute(
    tmp_path: Path, said: Callable[..., str]
) -> None:
    file = tmp_path / "found.json"
    systems = "ddp,ddp-best,bytesched"
    text = said(f"sim --ranks 2,16 --rate 950mbit --systems {systems} --json {file}")
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


def test_it_does_not_pay_where_communication_is_hidden(said: Callable[..., str]) -> None:
    text = said("sim --profile resnet --ranks 2 --rate 1000gbit --latency-us 1")
    assert "2 ranks: no gain here, " in text
    assert "hides behind backward" in text


def test_few_cores_are_said_and_cost_time(tmp_path: Path, said: Callable[..., str]) -> None:
    def ours_s(arguments: str) -> float:
        file = tmp_path / "found.json"
        systems = "--profile resnet --systems ddp,bytesched"
        text = said(f"sim --ranks 4 --rate 1gbit {systems} --json {file} {arguments}")
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
def test_how_all_reduces_run_is_said(arguments: str, words: str, said: Callable[..., str]) -> None:
    text = said(f"sim --profile resnet --ranks 32 --systems ddp {arguments}")
    assert words in text
