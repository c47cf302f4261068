"""The doctor's section on Horovod: its settings, its launchers, and trials of both controllers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bytesched.doctor import command as doctor
from bytesched.doctor import horovod as horovod_checks
from bytesched.doctor import probes as trials
from bytesched.doctor.checks import Check

if TYPE_CHECKING:
    from ranks import Ranks

Pools = Callable[[int], "Ranks"]


def _only(found: list[Check], name: str) -> Check:
    [check] = [check for check in found if check.name == name]
    return check


def test_defaults_are_horovods(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {check.name: check.detail for check in horovod_checks.settings()}
    assert all(check.status == "ok" for check in horovod_checks.settings())
    assert said["horovod autotune"].startswith("off;")
    assert said["horovod fusion"].startswith("up to 128 MiB;")
    assert said["horovod cycle"].startswith("every 1 ms;")
    assert said["horovod cache"].startswith("1024 tensors;")
    assert said["horovod timeline"].startswith("off;")
    assert said["horovod stall check"].startswith("warns after 60 s, does not end;")
    assert len(said) == 6


@pytest.mark.parametrize(
    ("name", "value", "check", "status", "said"),
    [
        ("AUTOTUNE", "1", "autotune", "warn", "leaves the optimizer as it is"),
        ("AUTOTUNE", "0", "autotune", "ok", "off"),
        ("AUTOTUNE", "false", "autotune", "ok", "off"),
        ("FUSION_THRESHOLD", "0", "fusion", "ok", "off (HOROVOD_FUSION_THRESHOLD)"),
        ("FUSION_THRESHOLD", "1048576", "fusion", "ok", "up to 1 MiB"),
        ("FUSION_THRESHOLD", "64MB", "fusion", "warn", "up to 64 B"),
        ("CYCLE_TIME", "0.5", "cycle", "ok", "every 0.5 ms (HOROVOD_CYCLE_TIME)"),
        ("CYCLE_TIME", "fast", "cycle", "warn", "every 0 ms"),
        ("CACHE_CAPACITY", "0", "cache", "ok", "in the order of their submission"),
        ("CACHE_CAPACITY", "100", "cache", "warn", "100 tensors"),
        ("CACHE_CAPACITY", "4096", "cache", "ok", "4096 tensors"),
        ("TIMELINE", "/x/t.json", "timeline", "ok", "rank 0 writes /x/t.json"),
        ("STALL_CHECK_DISABLE", "1", "stall check", "ok", "off; bytesched's timeout_s"),
        ("STALL_CHECK_TIME_SECONDS", "5", "stall check", "ok", "warns after 5 s, does not end"),
        ("STALL_SHUTDOWN_TIME_SECONDS", "90", "stall check", "ok", "ends after 90 s"),
        ("STALL_SHUTDOWN_TIME_SECONDS", "30", "stall check", "ok", "does not end"),
    ],
)
def test_setting_is_read_as_horovod_reads_it(
    name: str, value: str, check: str, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HOROVOD_{name}", value)
    found = _only(horovod_checks.settings(), f"horovod {check}")
    assert found.status == status
    assert said in found.detail
    assert bool(found.fix) == (status == "warn")


def test_two_settings_that_crash_a_restart_are_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    assert "horovod restart" not in _names(horovod_checks.settings())
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1048576")
    found = _only(horovod_checks.settings(), "horovod restart")
    assert found.status == "warn"
    assert "second hvd.init()" in found.detail


def test_launcher_is_found_beside_python_and_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("env/horovodrun", "bin/mpirun"):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    found = horovod_checks.launchers()
    assert _only(found, "mpirun") == Check("mpirun", "ok", str(tmp_path / "bin" / "mpirun"))
    assert _only(found, "horovodrun").detail == str(tmp_path / "env" / "horovodrun")
    assert str(tmp_path / "env") in _only(found, "horovodrun").fix
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    assert "as root" in _only(horovod_checks.launchers(), "mpirun").fix
    monkeypatch.setenv("PATH", "")
    assert _only(horovod_checks.launchers(), "mpirun") == Check("mpirun", "absent", "not found")


@pytest.mark.parametrize(("release", "needs_help"), [("4.1.6", False), ("5.0.11", True)])
def test_horovodrun_beside_open_mpi_5(
    release: str, needs_help: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its -bind-to is not known there any more."""
    for name in ("horovodrun", "mpirun"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho 'mpirun (Open MPI) {release}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ("--gloo" in _only(horovod_checks.launchers(), "horovodrun").fix) == needs_help


def test_without_horovod_there_is_no_section(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("backends", "loopback", "training"):
        monkeypatch.setattr(trials, name, lambda _: [Check("x", "ok", "")])
    monkeypatch.setattr(trials, "horovod", lambda _: [Check("horovod build", "ok", "")])
    monkeypatch.setattr(horovod_checks, "version", lambda: "0.28.1")
    assert {"horovod build", "horovodrun", "horovod cache"} <= _names(doctor.examine(timeout_s=5))
    monkeypatch.setattr(horovod_checks, "version", lambda: "")
    without = _names(doctor.examine(timeout_s=5))
    assert not {"horovod build", "horovodrun", "horovod cache"} & without


def _names(found: list[Check]) -> set[str]:
    return {check.name for check in found}


def test_broken_horovod_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_run_workers", lambda *_: ["exit code 1: ImportError: torch"])
    assert trials.horovod(timeout_s=1) == [
        Check(
            "horovod build",
            "warn",
            "exit code 1: ImportError: torch",
            "rebuild it against this torch (see the README, Install)",
        )
    ]


def test_a_controller_without_a_launcher_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    built = {"gloo": True, "mpi": False, "nccl": True}
    monkeypatch.setattr(trials, "_run_workers", lambda *_: [built])
    monkeypatch.setattr(trials, "launcher", lambda _: "")
    assert trials.horovod(timeout_s=1) == [
        Check("horovod build", "ok", "controllers gloo; operations gloo, nccl")
    ]


@pytest.mark.procs
@pytest.mark.timeout(240)
def test_both_controllers_are_tried_whatever_is_set(
    hvd_gloo: Pools, hvd_mpi: Pools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timeline = tmp_path / "timeline.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(timeline))
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_RANK", "5")
    monkeypatch.setenv("HOROVOD_SIZE", "8")
    monkeypatch.setenv("BYTESCHED_CROSS_BARRIER", "0")
    found = trials.horovod(timeout_s=60)
    assert _only(found, "horovod build").detail.startswith("controllers gloo, mpi; operations gloo")
    for controller in ("gloo", "mpi"):
        check = _only(found, f"horovod {controller}")
        assert check.status == "ok", check
        assert "two ranks all-reduce 4 B in" in check.detail
        assert check.detail.endswith(
            "4 steps equal those of plain Horovod, 3 of them across the barrier"
        )
    assert not timeline.exists()


@pytest.mark.procs
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_ranks_that_fail_are_a_finding(
    controller: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(f"hvd_{controller}")
    monkeypatch.setattr(trials, "WORKER", "no_such_module")
    check = trials._horovod_ranks(controller, timeout_s=30)
    assert check.status == "warn"
    assert "No module named no_such_module" in check.detail
    assert "no_such_module" in check.fix


@pytest.mark.procs
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_ranks_that_hang_are_ended(
    controller: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    request.getfixturevalue(f"hvd_{controller}")
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
    deadline_s = time.monotonic() + 20
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline_s, f"still running: {pids}"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False
