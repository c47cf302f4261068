"""Several ranks on one device: MPS, what is refused, and the table."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from fake_mps import FAILS, STUBBORN, FakeMps

from bytesched.bench import gpu_ranks
from bytesched.bench.gpu_ranks import agreement, interval, mps, nccl_variables, report
from bytesched.plugins.bench.gpu_worker import Spans, traced


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


def test_an_interval_holds_the_ratio() -> None:
    low, high = interval([[10.0, 11, 12], [10, 12, 13]], [[5.0, 5.5, 6], [5, 6, 6.5]])
    assert 1.5 < low <= 2 <= high < 2.5
    assert interval([[4.0]], [[2.0]]) == (2, 2)


@pytest.mark.parametrize(
    ("got", "said"),
    [
        ([[1.0, 2.0]], "same bits"),
        ([[1.0, 2.000002]], "within 1e-06"),
        ([[1.0, 3.0]], "DIFFER by 5e-01"),
        ([[1.0, float("nan")]], "DIFFER by"),
    ],
)
def test_losses_are_compared(got: list[list[float]], said: str) -> None:
    assert agreement([[1.0, 2.0]], got).startswith(said)


def test_a_trace_has_what_began_in_its_iteration() -> None:
    seen, ms = Spans(), 1_000_000
    for began in (0, 10, 20):
        seen.on_span("send", "weight", (began + 2) * ms, (began + 11) * ms, {"bytes": 4})
        seen.on_span("wait", "layer", (began + 4) * ms, (began + 5) * ms)
    passes = [("backward", 10 * ms), ("step", 13 * ms), ("forward", 14 * ms), ("backward", 20 * ms)]
    assert traced(seen, passes) == {
        "chunks": [["weight", 2, 11]],
        "gates": [["layer", 4, 5]],
        "passes": [["backward", 0], ["step", 3], ["forward", 4], ["backward", 10]],
    }


def _system(iteration_ms: float, **fields: Any) -> dict[str, Any]:
    turn = {"iteration_ms": [iteration_ms] * 2, "cpu_ms": 1.0, "peak_bytes": 2**21, **fields}
    return {"rounds": [turn, turn], "losses": [[1.0], [2.0]]}


def test_the_report_compares_with_the_best_other() -> None:
    trace = {
        "chunks": [["weight", 2.0, 3.5]],
        "gates": [["layer", 4.0, 6.0]],
        "passes": [["backward", 0.0], ["step", 3.0]],
    }
    bounds = {"compute": 50.0, "reduction": 60.0, "both_25": 70.0, "both_8": 80.0}
    found = {
        "specification": {"clip": 1.0, "model": "gpt", "sharing": "in turns"},
        "systems": {
            "ddp:bucket_mb=4": _system(105.0),
            "fsdp2": _system(84.0),
            "bytesched": _system(80.0, trace=trace),
        },
        "bounds": [bounds],
        "ranks": 2,
        "device": "a GPU",
        "carrier": "NCCL",
        "parameters": 2_000_000,
        "tensors": 3,
        "batch": 16,
    }
    text = report(found)
    assert "T* 70.0 ms (chunks of 25 MiB)" in text[2]
    assert text[5].split()[:4] == ["ddp:bucket_mb=4", "105.00", "1.500x", "0.800x"]
    assert text[6].split()[3:5] == ["1.000x", "-"]
    assert text[7].split()[3:5] == ["1.050x", "1.050-1.050"]
    assert all(line.endswith("same bits") for line in text[5:8])
    assert ["weight", "2.0", "3.5"] in [line.split() for line in text]
    assert ["layer", "4.0", "6.0"] in [line.split() for line in text]
