"""Ranks of `bytesched bench --gpu-ranks`, without a GPU: a whole run, and how it ends early."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_mps import FakeMps
from paths import ROOT
from warm_python import warm_python

from bytesched.commands import bench
from bytesched.environment import child_environment
from bytesched.lab.ranks import BenchError

COMMAND = ["--gpu-ranks", "2"]
QUICK = ["--iterations", "2", "--rounds", "2", "--warmup", "3"]
PATIENCE_S = 60.0


def _run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), "-m", "bytesched", "bench", *COMMAND, *QUICK, *options],
        cwd=folder,
        env=child_environment({"CUDA_VISIBLE_DEVICES": ""}),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def is_close(losses: str) -> bool:
    return losses == "identical" or float(losses.removeprefix("differ by ")) < 1e-2


@pytest.mark.parametrize(
    "model", ["small", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt", "conv"))]
)
def test_all_systems_have_the_same_losses(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMps(tmp_path, monkeypatch)
    done = _run(tmp_path, "--model", model, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert fake.verbs == ["start", "quit"]
    assert "side by side, by MPS" in done.stdout
    systems = ["ddp:bucket_mb=4", "ddp:bucket_mb=25", "ddp:bucket_mb=100", "fsdp2", "bytesched"]
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found["systems"]) == systems
    for name, its in found["systems"].items():
        assert [len(turn["iteration_ms"]) for turn in its["rounds"]] == [2, 2]
        assert its["losses"] == "identical" or name == "fsdp2"
        assert is_close(its["losses"]), name
    assert found["compute"]["optimum_ms"] > 0
    assert found["systems"]["bytesched"]["figures"]["speedup_over_best"] > 0


@pytest.mark.nightly
def test_clipped_ones_have_nearly_the_same_losses(tmp_path: Path) -> None:
    systems = "ddp,bytesched:split=off"
    done = _run(tmp_path, "--clip", "0.1", "--systems", systems, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["setting"]["clip"] == 0.1
    assert is_close(found["systems"]["bytesched:split=off"]["losses"])


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


@pytest.fixture
def lonely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ranks are `lonely_rank`, which leave their process ids in this folder."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'scripts'}")
    monkeypatch.setenv("LONELY_RANKS", str(tmp_path))
    return tmp_path


def test_a_rank_that_fails_ends_the_others(lonely: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMps(lonely, monkeypatch)
    monkeypatch.setattr(bench, "GPU_WORKER", "lonely_rank")
    monkeypatch.setenv("LONELY_FAILS", "1")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(BenchError, match="rank 1 failed with exit code 1:\nit has failed"):
        bench.main(COMMAND)
    assert not _is_alive(int((lonely / "rank0").read_text()))
    assert fake.verbs == ["start", "quit"]
    assert not Path(fake.started[0]).parent.exists()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_everything(
    number: signal.Signals, code: int, lonely: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMps(lonely, monkeypatch)
    program = (
        "import sys; from bytesched import cli; from bytesched.commands import bench; "
        "bench.GPU_WORKER = 'lonely_rank'; sys.exit(cli.main(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, "bench", *COMMAND])
    files, deadline_s = [lonely / "rank0", lonely / "rank1"], time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE_S) == code
    assert not any(_is_alive(int(file.read_text())) for file in files)
    assert fake.verbs == ["start", "quit"]
    assert not Path(fake.started[0]).parent.exists()
