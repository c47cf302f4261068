"""The doctor's section on Horovod: its settings and its launchers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from checks import only

from bytesched.commands import doctor as doctor
from bytesched.doctor import checks
from bytesched.doctor import horovod as horovod_checks
from bytesched.doctor import probes as trials
from bytesched.doctor.checks import Check


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("", "", ""),
        ("AUTOTUNE", "1", "leaves the optimizer as it is"),
        ("AUTOTUNE", "0", ""),
        ("AUTOTUNE", "false", ""),
        ("FUSION_THRESHOLD", "0", ""),
        ("FUSION_THRESHOLD", "1048576", ""),
        ("FUSION_THRESHOLD", "64MB", "HOROVOD_FUSION_THRESHOLD=64MB is read as 64"),
        ("CYCLE_TIME", "0.5", ""),
        ("CYCLE_TIME", "fast", "HOROVOD_CYCLE_TIME=fast is read as 0"),
        ("CACHE_CAPACITY", "0", ""),
        ("CACHE_CAPACITY", "100", "HOROVOD_CACHE_CAPACITY=100"),
        ("CACHE_CAPACITY", "4096", ""),
        ("TIMELINE", "/x/t.json", ""),
        ("STALL_SHUTDOWN_TIME_SECONDS", "1m", "is read as 1"),
        ("CYCLE_TIME FUSION_THRESHOLD", "1", "second hvd.init()"),
    ],
)
def test_settings_in_the_way_are_warned_about(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in name.split():
        monkeypatch.setenv(f"HOROVOD_{each}", value)
    [found] = horovod_checks.settings()
    assert found.status == ("warn" if said else "ok")
    assert said in found.detail
    assert bool(found.fix) == bool(said)


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
    assert only(found, "mpirun") == Check("mpirun", "ok", str(tmp_path / "bin" / "mpirun"))
    assert only(found, "horovodrun").detail == str(tmp_path / "env" / "horovodrun")
    assert str(tmp_path / "env") in only(found, "horovodrun").fix
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    assert "as root" in only(horovod_checks.launchers(), "mpirun").fix
    monkeypatch.setenv("PATH", "")
    assert only(horovod_checks.launchers(), "mpirun") == Check("mpirun", "absent", "not found")


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
    assert ("--gloo" in only(horovod_checks.launchers(), "horovodrun").fix) == needs_help


def test_without_horovod_there_is_no_section(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("backends", "loopback", "training"):
        monkeypatch.setattr(trials, name, lambda _: [Check("x", "ok", "")])
    monkeypatch.setattr(trials, "horovod", lambda _: [Check("horovod build", "ok", "")])
    monkeypatch.setattr(checks, "installed", lambda _: "9")
    assert {"horovod build", "horovodrun", "horovod settings"} <= _names(
        doctor.examine(timeout_s=5)
    )
    monkeypatch.setattr(checks, "installed", lambda name: "" if name == "horovod" else "9")
    without = _names(doctor.examine(timeout_s=5))
    assert not {"horovod build", "horovodrun", "horovod settings"} & without


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
