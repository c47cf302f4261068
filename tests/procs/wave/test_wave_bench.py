"""`bytesched wave`: what it measures is the same training, and its tables say what was found."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from warm_python import warm_python

from bytesched.plugins.bench.wave_command import main

SHORT = ["--iterations", "2", "--warmup", "1", "--rounds", "1", "--compute-scale", "0.02"]


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())


def test_ticktock_on_an_emulated_device(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    arguments = ["ticktock", "--emulate", "vgg", "--workers", "2", *SHORT, "--json", str(result)]
    assert main(arguments) == 0
    shown = capfd.readouterr().out
    for system in ("accumulation", "tick-tock", r"tick-tock\+bytesched"):
        assert re.search(rf"^{system} .*identical$", shown, re.MULTILINE), shown
    found = json.loads(result.read_text())
    assert found["command"].startswith("bytesched wave ticktock --emulate vgg")
    assert len(found["systems"]["tick-tock+bytesched"][0]) == 2


def test_model_waves_and_pipelines_train_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--emulate", "vgg", "--workers", "2", *SHORT]) == 0
    shown = capfd.readouterr().out
    for system in ("naive", "gpipe", "1f1b", "waves"):
        assert re.search(rf"^{system} .*(identical|differ by \de-0[6-9])$", shown, re.MULTILINE), (
            shown
        )
