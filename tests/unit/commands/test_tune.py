"""`bytesched tune`: what it shows and forgets; and what is printed of a tuning."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tuning_files import DONE, RUNNING

from bytesched import cli
from bytesched.tunable import Setting
from bytesched.tuning.file import Trial
from bytesched.tuning.memory import Memory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "bytesched" / "tuning"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "--show --forget is required"),
        ("--steps 9 -- torchrun train.py", "torchrun ... -m bytesched run --tune 1 train.py"),
        ("--show --steps 9", "bytesched run --tune 1 --set tune_steps=N"),
        ("--forget something", "no such tuning"),
    ],
)
def test_misuse_is_named(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert cli.main(["tune", *arguments.split()]) == 1
    assert said in capsys.readouterr().err


def test_what_is_known_is_shown_and_forgotten(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "--show"]) == 0
    assert "nothing is known" in capsys.readouterr().out
    memory = Memory(folder=cache)
    memory.save(DONE)
    memory.save(replace(RUNNING, fingerprint=replace(DONE.fingerprint, signature="other")))
    assert cli.main(["tune", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "9.1 % gained" in shown
    assert "unfinished after 120 steps" in shown
    name = next(path.stem for path, tuning in memory.entries() if tuning.setting)
    assert cli.main(["tune", "--forget", name]) == 0
    assert [tuning.state for _, tuning in memory.entries()] == ["running"]
    assert cli.main(["tune", "--forget", "all"]) == 0
    assert list(memory.entries()) == []


TRIALS = tuple(
    Trial(Setting(p << 18, w * p << 18), phase, 400.0 + p + w, (400.0, 402.0 + p, 900.0), p == 4)
    for p in (1, 2, 4)
    for w, phase in ((1, "search"), (2, "guard"))
)


def test_the_settings_that_were_tried_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Memory(tmp_path / "tuning.json").save(replace(DONE, trials=TRIALS))
    assert cli.main(["report", str(path)]) == 0
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert head == str(path)
    assert titles.split() == ["phase", "setting", "step", "ms", "steps"]
    assert len(rows) == len(TRIALS)
    assert "partition 1 MiB, credit 1 MiB" in rows[-2]
    assert rows[-2].endswith("405.0      3  cut short")
    assert cli.main(["report", str(path), "-o", str(tmp_path / "out.png")]) == 1
    assert "leave out -o" in capsys.readouterr().err


def test_a_tuning_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text('{"trials": []}')
    assert cli.main(["report", str(tmp_path / "x.json")]) == 1
    assert "x.json: not the memory of a tuning" in capsys.readouterr().err


def test_what_is_known_is_shown_without_what_a_search_needs(cache: Path) -> None:
    Memory(folder=cache).save(DONE)
    only_the_standard_library = (
        "import sys; sys.modules.update(dict.fromkeys("
        "['numpy', 'sklearn', 'platformdirs', 'torch']))\n"
        "from bytesched import cli; sys.exit(cli.main(['tune', '--show']))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", only_the_standard_library],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "9.1 % gained" in shown.stdout
