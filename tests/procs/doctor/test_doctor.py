"""The doctor's workers, for real."""

from __future__ import annotations

import json
import sys

import pytest
from checks import only
from warm_python import warm_python

from bytesched.commands import doctor as doctor
from bytesched.doctor import probes as trials


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers need not import torch; that they can is shown by one, and at night by all."""
    monkeypatch.setattr(sys, "executable", warm_python())


def test_a_worker_that_imports_torch_finds_its_backends() -> None:
    assert "gloo" in only(trials.backends(timeout_s=200), "backends").detail


@pytest.mark.parametrize("is_warm", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_this_machine_is_ready(
    is_warm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_warm:
        monkeypatch.setattr(sys, "executable", warm_python())
    assert doctor.main(["--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    statuses = {check["name"]: check["status"] for check in answer["checks"]}
    own = ("python", "bytesched", "torch", "ranks", "config")
    for name in (*own, "backends", "loopback", "training"):
        assert statuses[name] == "ok"
    assert "8 MiB in" in next(c["detail"] for c in answer["checks"] if c["name"] == "loopback")


@pytest.mark.usefixtures("warm")
def test_loopback_fails_by_name_when_the_network_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    check = only(trials.loopback(timeout_s=200), "loopback")
    assert check.status == "fail"
    assert "rank 0: exit code 1" in check.detail
    assert "nosuch0" in check.detail


@pytest.mark.usefixtures("warm")
def test_launcher_around_the_doctor_does_not_reach_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert only(trials.loopback(timeout_s=200), "loopback").status == "ok"


@pytest.mark.usefixtures("warm")
def test_settings_of_the_user_do_not_reach_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHED_CREDIT_BYTES", "1KiB")
    monkeypatch.setenv("BYTESCHED_CROSS_BARRIER", "0")
    check = only(trials.training(timeout_s=200), "training")
    assert check.status == "ok"
    assert check.detail.startswith("4 steps equal those of plain DDP")
