"""The doctor: every finding it can make, the answers of its workers, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checks import only

from bytesched.commands import doctor as doctor
from bytesched.doctor import checks
from bytesched.doctor import probes as trials
from bytesched.doctor.checks import Check


def test_a_failure_is_exit_code_1_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda _: [Check("x", "fail", "broken", "mend it")])
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert shown.split()[:3] == ["[FAIL]", "x", "broken"]
    assert "fix: mend it" in shown
    assert shown.endswith("not ready: x\n")


def test_a_warning_is_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda _: [Check("x", "warn", "odd")])
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.split() == ["[warn]", "x", "odd", "ready"]


def test_missing_torch_fails_and_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_version", lambda package: "" if package == "torch" else "1.0")
    monkeypatch.setattr(trials, "WORKER", "never.started")
    found = doctor.examine(timeout_s=5)
    assert only(found, "torch") == Check(
        "torch", "fail", "not installed", "pip install 'bytesched[torch]'"
    )
    assert not [check for check in found if check.name in ("backends", "loopback", "training")]


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.3.1", "fail"), ("2.4.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0.0a0+git1", "ok")],
)
def test_oldest_torch(version: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_version", lambda _: version)
    assert only(checks.versions(), "torch").status == status


def test_an_absent_extra_names_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_version", lambda _: "")
    check = only(checks.optional_packages(), "matplotlib")
    assert check.status == "absent"
    assert "pip install 'bytesched[report]'" in check.detail


def test_ranks_out_of_range_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check = only(checks.environment(), "ranks")
    assert check.status == "fail"
    assert check.detail == "rank 2 of 2, launcher torchrun"


def test_too_many_threads_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    check = only(checks.environment(), "cores")
    assert check.status == "warn"
    assert "OMP_NUM_THREADS=9999" in check.detail


def test_bad_setting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHED_TIMEOUT_S", "-1")
    check = only(checks.configuration(), "config")
    assert check.status == "fail"
    assert "BYTESCHED_TIMEOUT_S" in check.detail


def test_wrong_interface_and_unknown_master_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("MASTER_ADDR", "host.invalid")
    found = checks.network()
    assert "nosuch0" in only(found, "interface").detail
    assert "lo" in only(found, "interface").fix
    assert only(found, "MASTER_ADDR").status == "fail"


def test_emulated_hosts_are_an_extra_that_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    [check] = checks.emulated_hosts()
    assert check.status == "absent"
    assert check.detail


def test_broken_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "WORKER", "no_such_module")
    check = only(trials.backends(timeout_s=200), "backends")
    assert check.status == "fail"
    assert "No module named no_such_module" in check.detail


def test_hanging_worker_is_ended_and_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(trials, "WORKER", "sleeper")
    # It returns when its workers have ended.
    check = only(trials.loopback(timeout_s=0.5), "loopback")
    assert check.status == "fail"
    assert "rank 1: no answer within 0.5 s" in check.detail


@pytest.mark.parametrize(
    ("equal", "crossed", "status", "said"),
    [(False, 3, "fail", "differ"), (True, 0, "warn", "0 of them"), (True, 3, "ok", "3 of them")],
)
def test_training_is_judged(
    equal: bool, crossed: int, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    well = {"steps": 4, "equal": True, "crossed_steps": 3}
    bad = {"steps": 4, "equal": equal, "crossed_steps": crossed}
    monkeypatch.setattr(trials, "_run_workers", lambda *_: [well, bad])
    check = only(trials.training(timeout_s=1), "training")
    assert check.status == status
    assert said in check.detail


def test_training_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_run_workers", lambda *_: ["exit code 1: boom", {}])
    check = only(trials.training(timeout_s=1), "training")
    assert check.status == "fail"
    assert check.detail == "rank 0: exit code 1: boom"


def test_config_is_shown_with_origins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BYTESCHED_PARTITION_BYTES", "1MiB")
    assert doctor.main(["--config"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["partition_bytes", "1048576", "environment", "BYTESCHED_PARTITION_BYTES"] in rows
    assert ["enabled", "True", "default"] in rows
    assert doctor.main(["--config", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["policy"] == {"value": "priority", "origin": "default"}
