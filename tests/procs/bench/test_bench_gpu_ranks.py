"""Ranks of `bytesched bench --gpu-ranks`, without a GPU: a whole run, and how it ends early."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from fake_mps import FakeMps
from paths import ROOT
from small_benches import QUICK, Bench

from bytesched.bench.systems import GPU_SYSTEMS
from bytesched.commands import bench as command
from bytesched.lab.ranks import BenchError

COMMAND = ["--gpu-ranks", "2", "--device", "cpu"]


@pytest.mark.parametrize(
    "model", ["small", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt", "conv"))]
)
def test_all_systems_have_the_same_losses(
    model: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMps(bench.folder, monkeypatch)
    found = bench.result(*COMMAND, *QUICK, "--model", model, "--trace")
    said = found["stdout"]
    assert fake.verbs == ["start", "quit"]
    assert "side by side, by MPS" in said
    assert tuple(found["systems"]) == GPU_SYSTEMS
    for name, its in found["systems"].items():
        assert its["losses"] == "identical" or (name == "fsdp2" and is_close(its["losses"]))
        assert [len(turn["iteration_ms"]) for turn in its["rounds"]] == [2, 2]
        assert len(its["compared"]["losses"]) == 2
    assert found["compute"]["optimum_ms"] > 0
    trace = found["systems"]["bytesched"]["trace"]
    assert [name for name, _ in trace["passes"]] == ["backward", "step", "forward", "backward"]
    for _, sent, arrived in trace["chunks"]:
        assert 0 <= sent <= arrived
    assert "an iteration of bytesched" in said


def is_close(losses: str) -> bool:
    return losses == "equal, weights not" or float(losses.removeprefix("differ by ")) < 1e-2


@pytest.mark.nightly
def test_clipped_ones_have_nearly_the_same_losses(bench: Bench) -> None:
    options = ["--clip", "0.1", "--systems", "ddp,bytesched:split=off"]
    its = bench.result(*COMMAND, *QUICK, *options)["systems"]["bytesched:split=off"]
    assert its["losses"] == "identical" or is_close(its["losses"])


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMps(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'scripts'}")
    monkeypatch.setenv("LONELY_RANKS", str(tmp_path))
    monkeypatch.setattr(command, "GPU_WORKER", "lonely_rank")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(BenchError, match="rank 1 failed with exit code 1:\nit has failed"):
        command.main(COMMAND)
    assert not _is_alive(int((tmp_path / "rank0").read_text()))
    assert fake.verbs == ["start", "quit"]
    assert not Path(fake.started[0]).parent.exists()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
