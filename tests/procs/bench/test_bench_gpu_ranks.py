"""Ranks of `bytesched bench --gpu-ranks`, without a GPU: a whole run, and how it ends early."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_mps import FakeMps
from paths import ROOT
from small_benches import QUICK, Bench

from bytesched.bench import gpu_ranks
from bytesched.commands.bench import main
from bytesched.lab.ranks import BenchError

COMMAND = ["--gpu-ranks", "2", "--device", "cpu"]
PATIENCE_S = 60.0


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
    systems = ["ddp:bucket_mb=4", "ddp:bucket_mb=25", "ddp:bucket_mb=100", "fsdp2", "bytesched"]
    lines = said.partition("95 %")[2].splitlines()[1:6]
    assert [line.split()[0] for line in lines] == systems
    for line in (*lines[:3], lines[4]):
        assert line.endswith("same bits"), line
    assert "DIFFER" not in lines[3]
    assert len(found["bounds"]) == 2
    assert set(found["bounds"][0]) == {"compute", "reduction", "both_25", "both_8"}
    for its in found["systems"].values():
        assert [len(turn["iteration_ms"]) for turn in its["rounds"]] == [2, 2]
        assert len(its["losses"]) == 2
    trace = found["systems"]["bytesched"]["rounds"][-1]["trace"]
    assert [name for name, _ in trace["passes"]] == ["backward", "step", "forward", "backward"]
    for _, sent, arrived in trace["chunks"]:
        assert 0 <= sent <= arrived
    assert "an iteration of bytesched" in said


@pytest.mark.nightly
def test_clipped_ones_have_nearly_the_same_losses(bench: Bench) -> None:
    options = ["--clip", "0.1", "--systems", "ddp,bytesched:split=off"]
    said = bench.result(*COMMAND, *QUICK, *options)["stdout"]
    assert "clipped to 0.1" in said
    assert "DIFFER" not in said


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
    monkeypatch.setattr(gpu_ranks, "WORKER", "lonely_rank")
    monkeypatch.setenv("LONELY_FAILS", "1")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(BenchError, match="rank 1 failed with exit code 1:\nit has failed"):
        main(COMMAND)
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
        "import sys; from bytesched import cli; from bytesched.bench import gpu_ranks; "
        "gpu_ranks.WORKER = 'lonely_rank'; sys.exit(cli.main(sys.argv[1:]))"
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
