"""`bytesched tune`: what it shows and forgets; and what is printed of a tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tuning_files import DONE, RUNNING

from bytesched.tunable import Setting
from bytesched.tuning.file import Trial
from bytesched.tuning.memory import Memory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "bytesched" / "tuning"


def test_what_is_known_is_shown_and_forgotten(cache: Path, said: Callable[..., str]) -> None:
    assert "nothing is known" in said("tune --show")
    memory = Memory(folder=cache)
    memory.save(DONE)
    memory.save(replace(RUNNING, fingerprint=replace(DONE.fingerprint, signature="other")))
    shown = said("tune --show")
    assert "9.1 % gained" in shown
    assert "unfinished after 120 steps" in shown
    name = next(path.stem for path, tuning in memory.entries() if tuning.setting)
    said("tune --forget", name)
    assert [tuning.state for _, tuning in memory.entries()] == ["running"]
    said("tune --forget all")
    assert list(memory.entries()) == []
    assert "no such tuning" in said("tune --forget something", code=1)


TRIALS = tuple(
    Trial(Setting(p << 18, w * p << 18), phase, 400.0 + p + w, (400.0, 402.0 + p, 900.0), p == 4)
    for p in (1, 2, 4)
    for w, phase in ((1, "search"), (2, "guard"))
)


def test_the_settings_that_were_tried_are_printed(tmp_path: Path, said: Callable[..., str]) -> None:
    path = tmp_path / "tuning.json"
    Memory(path).save(replace(DONE, trials=TRIALS))
    head, titles, *rows = said("report", path).splitlines()
    assert head == str(path)
    assert titles.split() == ["phase", "setting", "step", "ms", "steps"]
    assert len(rows) == len(TRIALS)
    assert "partition 1 MiB, credit 1 MiB" in rows[-2]
    assert rows[-2].endswith("405.0      3  cut short")
    assert "leave out -o" in said("report", path, "-o", tmp_path / "out.png", code=1)
    path.write_text('{"trials": []}')
    assert f"{path.name}: not the memory of a tuning" in said("report", path, code=1)


def test_what_is_known_is_shown_without_what_a_search_needs(
    cache: Path, python: Callable[..., str]
) -> None:
    Memory(folder=cache).save(DONE)
    only_the_standard_library = (
        "import sys; sys.modules.update(dict.fromkeys("
        "['numpy', 'sklearn', 'platformdirs', 'torch']))\n"
        "from bytesched import cli; sys.exit(cli.main(['tune', '--show']))"
    )
    assert "9.1 % gained" in python("-c", only_the_standard_library)
