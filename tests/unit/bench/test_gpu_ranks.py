"""Several ranks on one device: MPS."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fake_mps import FAILS, STUBBORN, FakeMps

from bytesched.bench import gpu_ranks
from bytesched.bench.gpu_ranks import mps, nccl_variables


def test_each_rank_is_on_a_host_of_its_own() -> None:
    assert nccl_variables(0)["NCCL_HOSTID"] != nccl_variables(1)["NCCL_HOSTID"]


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
