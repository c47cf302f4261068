"""`bytesched wave`: what it measures is the same training, and its tables say what was found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bytesched.plugins.bench.wave_command import main, table

SHORT = ["--iterations", "2", "--warmup", "1", "--rounds", "1", "--compute-scale", "0.02"]


@pytest.mark.procs
def test_ticktock_on_an_emulated_device(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    arguments = ["ticktock", "--emulate", "vgg", "--workers", "2", *SHORT, "--json", str(result)]
    assert main(arguments) == 0
    shown = capfd.readouterr().out
    for system in ("accumulation", "tick-tock", r"tick-tock\+bytesched"):
        assert re.search(rf"^{system} .*identical$", shown, re.MULTILINE), shown
    assert re.search(r"^per-wave .*(identical|differ by \de-0[6-9])$", shown, re.MULTILINE), shown
    found = json.loads(result.read_text())
    assert found["command"].startswith("bytesched wave ticktock --emulate vgg")
    assert len(found["systems"]["per-wave"][0]) == 2


@pytest.mark.procs
def test_model_waves_and_pipelines_train_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--emulate", "vgg", "--workers", "2", *SHORT]) == 0
    shown = capfd.readouterr().out
    for system in ("naive", "gpipe", "1f1b", "waves"):
        assert re.search(rf"^{system} .*(identical|differ by \de-0[6-9])$", shown, re.MULTILINE), (
            shown
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ticktock", "--model", "gtp"], "there are gpt, vgg, resnet, lstm"),
        (["ticktock", "--lab", "2", "--workers", "2"], "exclude each other"),
        (["model", "--model", "gpt"], "vgg is a plain chain"),
        (["ticktock", "--emulate", "vgg", "--slots", "0"], "--slots 0: at least 1"),
        (["ticktock", "--waves", "1"], "--waves 1: at least 2"),
        (["model", "--iterations", "0"], "--iterations 0: at least 1"),
        (["model", "--workers", "1"], "--workers 1: from 2 to 64"),
    ],
)
def test_what_cannot_be_run(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_table_compares_round_by_round() -> None:
    """The second round is twice as slow for both, and the ratio stays 2."""

    def turn(ms: float, losses: list[float]) -> list[dict[str, object]]:
        return [{"iteration_ms": [ms] * 3, "losses": losses, "activation_bytes": 2_500_000}]

    found = {
        "accumulation": [turn(10.0, [1.0, 0.5]), turn(20.0, [1.0, 0.5])],
        "tick-tock": [turn(5.0, [1.0, 0.5]), turn(10.0, [1.0, 0.5])],
        "per-wave": [turn(5.0, [1.0, 0.505])] * 2,
    }
    lines = table(found, "accumulation")
    assert re.search(r"tick-tock +7.5 +5 to 10 +2.00x +2.50 +identical", lines[2])
    assert lines[3].endswith("differ by 1e-02")
