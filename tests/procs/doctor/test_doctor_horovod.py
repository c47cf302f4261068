"""The doctor's trials of Horovod's controllers."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from checks import only
from horovod_launched import Kind, why_missing

from bytesched.doctor import probes as trials

pytestmark = pytest.mark.needs("horovod")


@pytest.fixture(params=["gloo", "mpi"])
def controller(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    if reason := why_missing(kind):
        pytest.skip(reason)
    return kind


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor starts need not import torch; see test_doctor for what it does."""
    from ranks import HOROVOD
    from warm_python import warm_python

    monkeypatch.setattr(sys, "executable", warm_python(*HOROVOD))


@pytest.mark.nightly
@pytest.mark.slow
def test_both_controllers_are_tried_whatever_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if reason := why_missing("gloo") or why_missing("mpi"):
        pytest.skip(reason)
    timeline = tmp_path / "timeline.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(timeline))
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_RANK", "5")
    monkeypatch.setenv("HOROVOD_SIZE", "8")
    monkeypatch.setenv("BYTESCHED_CROSS_BARRIER", "0")
    found = trials.horovod(timeout_s=200)
    assert only(found, "horovod build").detail.startswith("controllers gloo, mpi; operations gloo")
    for controller in ("gloo", "mpi"):
        check = only(found, f"horovod {controller}")
        assert check.status == "ok", check
        assert "two ranks all-reduce 4 B in" in check.detail
        # On a busy machine the sums of some have come before step().
        said = r"4 steps equal those of plain Horovod, [1-3] of them across the barrier$"
        assert re.search(said, check.detail), check
    assert not timeline.exists()


def test_ranks_that_fail_are_a_finding(controller: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "WORKER", "no_such_module")
    check = trials._horovod_ranks(controller, timeout_s=200)
    assert check.status == "warn"
    assert "No module named no_such_module" in check.detail
    assert "no_such_module" in check.fix


@pytest.mark.nightly
def test_ranks_that_hang_are_ended(
    controller: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(trials, "WORKER", "sleeper")
    check = trials._horovod_ranks(controller, timeout_s=5)
    assert check.status == "warn"
    assert check.detail == "no answer within 5 s"
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]
    deadline_s = time.monotonic() + 60
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline_s, f"still running: {pids}"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False
