"""Several ranks on one device: MPS, and an iteration that is traced."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fake_mps import FAILS, STUBBORN, FakeMps

from bytesched.bench import gpu_ranks
from bytesched.bench.gpu_ranks import mps
from bytesched.plugins.bench.gpu import traced
from bytesched.trace.reading import Span, Trace


@pytest.mark.parametrize("raises", [False, True])
def test_mps_is_told_to_quit(raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMps(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    try:
        with mps() as (variables, sharing):
            assert sharing == "side by side, by MPS"
            assert fake.verbs == ["start"]
            # Its clients' numbers are those of what it sees.
            assert fake.started == [variables["CUDA_MPS_PIPE_DIRECTORY"], "none"]
            assert Path(variables["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
            if raises:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert raises
    assert fake.verbs == ["start", "quit"]
    assert not Path(fake.started[0]).parent.exists()


def test_an_mps_that_does_not_quit_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_ranks, "_PATIENCE_S", 2.0)
    FakeMps(tmp_path, monkeypatch, STUBBORN)
    with mps() as (variables, _):
        pipes = Path(variables["CUDA_MPS_PIPE_DIRECTORY"])
        daemon = int((pipes / "nvidia-cuda-mps-control.pid").read_text())
        os.kill(daemon, 0)
    # It goes when it gets a core.
    deadline_s = time.monotonic() + 60.0
    while _is_running(daemon):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ranks_take_turns_where_mps_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMps(tmp_path, monkeypatch, FAILS)
    with mps() as (variables, sharing):
        assert variables == {}
        assert "in turns" in sharing
        assert "not permitted" in sharing
    assert fake.verbs == ["start", "quit"]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpu_ranks, "_FOLDERS", "")
    with mps() as (variables, sharing):
        assert (variables, sharing) == ({}, "in turns: there is no nvidia-cuda-mps-control")


def test_a_trace_has_what_began_in_its_iteration() -> None:
    trace = Trace(0)
    for track, name, start_ms, end_ms in (
        ("send", "weight", 2.0, 11.0),
        ("wait", "layer", 4.0, 5.0),
        ("backward", "backward", 0.0, 3.0),
        ("step", "optimizer.step", 3.0, 4.0),
        ("forward", "forward", 4.0, 10.0),
    ):
        trace.spans[track] = [
            Span(began + start_ms, began + end_ms, name, {}) for began in (0.0, 10.0, 20.0)
        ]
    assert traced(trace) == {
        "chunks": [["weight", 2, 11]],
        "gates": [["layer", 4, 5]],
        "passes": [["backward", 0], ["step", 3], ["forward", 4], ["backward", 10]],
    }
