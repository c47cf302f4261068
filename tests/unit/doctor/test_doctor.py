"""The doctor: every finding it can make, of Horovod too, its workers' answers, the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checks import only

from bytesched.commands import doctor as doctor
from bytesched.doctor import checks
from bytesched.doctor import probes as trials
from bytesched.doctor.checks import Check


@pytest.mark.parametrize(
    ("check", "code", "shown"),
    [
        (Check("x", "fail", "broken", "mend it"), 1, "[FAIL] x broken fix: mend it not ready: x"),
        (Check("x", "warn", "odd"), 0, "[warn] x odd ready"),
    ],
)
def test_a_failure_is_exit_code_1_and_a_warning_none(
    check: Check, code: int, shown: str, monkeypatch: pytest.MonkeyPatch, said: Callable[..., str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda _: [check])
    assert " ".join(said("doctor", code=code).split()) == shown


def test_missing_torch_fails_and_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "installed", lambda package: "" if package == "torch" else "1.0")
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
    monkeypatch.setattr(checks, "installed", lambda _: version)
    assert only(checks.versions(), "torch").status == status


def test_an_absent_extra_names_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "installed", lambda _: "")
    check = only(checks.optional_packages(), "matplotlib")
    assert check.status == "absent"
    assert "pip install 'bytesched[report]'" in check.detail


@pytest.mark.parametrize(
    ("look", "name", "variables", "status", "said"),
    [
        (
            *(checks.environment, "ranks", {"RANK": "2", "WORLD_SIZE": "2"}, "fail"),
            "rank 2 of 2, launcher torchrun",
        ),
        (checks.environment, "cores", {"OMP_NUM_THREADS": "9999"}, "warn", "OMP_NUM_THREADS=9999"),
        (checks.configuration, "config", {"BYTESCHED_TIMEOUT_S": "-1"}, "fail", "TIMEOUT_S"),
        (checks.network, "interface", {"GLOO_SOCKET_IFNAME": "nosuch0"}, "fail", "nosuch0"),
        (checks.network, "MASTER_ADDR", {"MASTER_ADDR": "host.invalid"}, "fail", "host.invalid"),
        (checks.emulated_hosts, "lab", {"PATH": ""}, "absent", ""),
    ],
)
def test_variables_in_the_way_are_findings(
    look: Callable[[], list[Check]],
    name: str,
    variables: dict[str, str],
    status: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    check = only(look(), name)
    assert check.status == status
    assert check.detail
    assert said in check.detail
    assert "lo" in check.fix or name != "interface"


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


_WELL = {"steps": 4, "equal": True, "crossed_steps": 3}


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ({**_WELL, "equal": False}, "fail", "differ"),
        ({**_WELL, "crossed_steps": 0}, "warn", "0 of them"),
        (_WELL, "ok", "3 of them"),
        ("exit code 1: boom", "fail", "rank 1: exit code 1: boom"),
    ],
)
def test_training_is_judged(
    answer: object, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_run_workers", lambda *_: [_WELL, answer])
    check = only(trials.training(timeout_s=1), "training")
    assert check.status == status
    assert said in check.detail


def test_config_is_shown_with_origins(
    monkeypatch: pytest.MonkeyPatch, said: Callable[..., str]
) -> None:
    monkeypatch.setenv("BYTESCHED_PARTITION_BYTES", "1MiB")
    rows = [line.split() for line in said("doctor --config").splitlines()]
    assert ["partition_bytes", "1048576", "environment", "BYTESCHED_PARTITION_BYTES"] in rows
    assert ["enabled", "True", "default"] in rows
    answer = json.loads(said("doctor --config --json"))
    assert answer["policy"] == {"value": "priority", "origin": "default"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("", "", ""),
        ("AUTOTUNE", "1", "leaves the optimizer as it is"),
        ("AUTOTUNE", "0", ""),
        ("AUTOTUNE", "false", ""),
        ("FUSION_THRESHOLD", "0", ""),
        ("FUSION_THRESHOLD", "1048576", ""),
        ("CYCLE_TIME", "0.5", ""),
        ("CACHE_CAPACITY", "0", ""),
        ("CACHE_CAPACITY", "100", "HOROVOD_CACHE_CAPACITY=100"),
        ("CACHE_CAPACITY", "4096", ""),
        ("TIMELINE", "/x/t.json", ""),
        ("CYCLE_TIME FUSION_THRESHOLD", "1", "second hvd.init()"),
    ],
)
def test_settings_in_the_way_are_warned_about(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in name.split():
        monkeypatch.setenv(f"HOROVOD_{each}", value)
    [found] = checks.horovod()
    assert found.status == ("warn" if said else "ok")
    assert said in found.detail
    assert bool(found.fix) == bool(said)


def test_without_horovod_there_is_no_section(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("backends", "loopback", "training"):
        monkeypatch.setattr(trials, name, lambda _: [Check("x", "ok", "")])
    monkeypatch.setattr(checks, "installed", lambda _: "9")
    assert "horovod settings" in _names(doctor.examine(timeout_s=5))
    monkeypatch.setattr(checks, "installed", lambda name: "" if name == "horovod" else "9")
    assert "horovod settings" not in _names(doctor.examine(timeout_s=5))


def _names(found: list[Check]) -> set[str]:
    return {check.name for check in found}
