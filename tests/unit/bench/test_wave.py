"""`bytesched wave`: what it refuses, and its table."""

from __future__ import annotations

import re

import pytest

from bytesched.plugins.bench.wave_command import main, table


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
        "tick-tock+bytesched": [turn(5.0, [1.0, 0.505])] * 2,
    }
    lines = table(found, "accumulation")
    assert re.search(r"tick-tock +7.5 +5 to 10 +2.00x +2.50 +identical", lines[2])
    assert lines[3].endswith("differ by 1e-02")
