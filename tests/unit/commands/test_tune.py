"""`bytesched tune`: what it runs, shows, keeps and forgets; and what is printed of a tuning."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from paths import SUPPORT
from tuning_files import DONE, RUNNING

from bytesched import cli
from bytesched.commands.tune import KILLED, summary
from bytesched.tunable import Setting
from bytesched.tuning.file import Trial, TuningFile
from bytesched.tuning.memory import Memory

WRITER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from tuning_files import DONE, RUNNING
from bytesched.tuning.memory import Memory
assert os.environ["BYTESCHED_TUNE"] == "1", os.environ
assert os.environ["BYTESCHED_TUNE_STEPS"] == "77", os.environ
memory = Memory(os.environ["BYTESCHED_TUNE_FILE"])
print("a line of the training", flush=True)
memory.save(RUNNING)
{end}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "bytesched" / "tuning"


def writing(end: str) -> list[str]:
    """A training that leaves a file as the tuner does, and then does `end`."""
    return [sys.executable, "-c", WRITER.format(end=end), str(SUPPORT)]


def tune(end: str, *options: str) -> int:
    return cli.main(["tune", "--steps", "77", *options, "--", *writing(end)])


def test_a_tuned_run_is_saved_and_told(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert tune("memory.save(DONE)") == 0
    out, err = capfd.readouterr()
    assert "a line of the training" in out
    assert "BYTESCHED_PARTITION_BYTES=1048576 BYTESCHED_CREDIT_BYTES=3145728" in out
    assert "440.0 ms" in out
    ((path, tuning),) = Memory(folder=cache).entries()
    assert tuning.setting == DONE.setting
    assert f"saved in {path}; the next run with BYTESCHED_TUNE=1 begins" in out
    assert [file.name for file in cache.iterdir() if "running" in file.name] == []
    assert "of 77 steps" in err
    assert summary(replace(RUNNING, more_trials=3)).startswith("trial 2 of about 5, best 400.0 ms")


def test_a_file_of_ones_own(tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert tune("memory.save(DONE)", "--save", "mine.json") == 0
    assert f"BYTESCHED_TUNE_FILE={tmp_path / 'mine.json'} begins" in capfd.readouterr().out
    assert TuningFile.read(tmp_path / "mine.json").setting == DONE.setting
    assert list(Memory(folder=cache).entries()) == []


def test_it_tunes_whatever_is_known(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file of before is replaced by what was found, and by nothing less."""
    mine = tmp_path / "mine.json"
    before = Memory(mine).save(replace(DONE, setting=Setting(1 << 16, 1 << 16)))
    assert before == mine
    content = mine.read_bytes()
    assert tune("", "--save", "mine.json") == 1
    assert "before the tuning did" in capfd.readouterr().err
    assert mine.read_bytes() == content
    assert tune("memory.save(DONE)", "--save", "mine.json") == 0
    assert TuningFile.read(mine).setting == DONE.setting
    assert [path.name for path in tmp_path.glob("*.json")] == ["mine.json"]


def test_what_is_set_elsewhere_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHED_TUNE_FILE", "mine.json")
    monkeypatch.setenv("BYTESCHED_TUNE_STEPS", "77")
    (tmp_path / "bytesched.toml").write_text('tune_space = "credit_bytes=..4MiB"')
    space = "assert os.environ['BYTESCHED_TUNE_SPACE'] == 'credit_bytes=..4MiB', os.environ"
    assert cli.main(["tune", "--", *writing(f"{space}; memory.save(DONE)")]) == 0
    assert TuningFile.read(tmp_path / "mine.json").setting == DONE.setting


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(3)", 3, "before the tuning did"),
        ("", 1, "before the tuning did"),
        ("os.remove(os.environ['BYTESCHED_TUNE_FILE'])", 1, "nothing was tuned"),
    ],
)
def test_a_run_that_ends_early(
    end: str, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tune(end) == code
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_it_started_ends_with_it_and_what_it_found_stays(
    number: signal.Signals, cache: Path
) -> None:
    training = writing("memory.save(DONE); print(os.getpid(), flush=True); time.sleep(600)")
    command = [sys.executable, "-m", "bytesched", "tune", "--steps", "77", "--", *training]
    # The tests themselves may run under nohup, and what is ignored is inherited.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(number, before)
    with started as tuning:
        assert tuning.stdout is not None
        assert tuning.stdout.readline() == "a line of the training\n"
        child = int(tuning.stdout.readline())
        tuning.send_signal(number)
        assert tuning.wait(20) == KILLED + number
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    ((path, found),) = Memory(folder=cache).entries()
    assert found.setting == DONE.setting
    assert "running" not in path.name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "0"], "tune_steps"),
        (["--steps", "many"], "tune_steps"),
        (["--space", "partition_bytes=-1..2MiB"], "negative"),
        (["--space", "partition_bytes=1MiB credit_bytes=1MiB"], "nothing to tune"),
        (["--save", "foreign.json"], "name another file"),
        (["--save", "no/such/folder/x.json"], "no such folder"),
        (["--forget", "something"], "no such tuning"),
    ],
)
def test_misuse_is_named_before_anything_runs(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign.json").write_text("{}")
    assert cli.main(["tune", *options, "--", sys.executable, "-c", "raise SystemExit(9)"]) == 1
    assert said in capsys.readouterr().err
    assert (tmp_path / "foreign.json").read_text() == "{}"


@pytest.mark.parametrize("program", ["nosuchprogram", "/", "a\0b"])
def test_a_program_that_cannot_be_started_is_named(
    program: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "--", program]) == 1
    assert f"{program!r} cannot be started" in capsys.readouterr().err


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


WITHOUT_WRAP = """
import sys
from bytesched.environment import own_variables
assert "bytesched.commands.run" in sys.modules, "this is not bytesched run"
assert own_variables()["BYTESCHED_TUNE"] == "1"
"""


def test_a_script_that_does_not_wrap_is_run_by_bytesched_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_WRAP)
    assert cli.main(["tune", "--", sys.executable, "train.py"]) == 1
    out, err = capfd.readouterr()
    assert "Error" not in out
    assert f"tune: runs {sys.executable} -m bytesched run train.py" in err


def test_where_no_script_is_found_that_is_said_before_it_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["tune", "--", "sh", "-c", "echo trained >&2"]) == 1
    out, err = capfd.readouterr()
    assert err.startswith("tune: no Python script was found in ")
    assert err.index("\ntrained") > 0
    assert not out


TRIED = tuple(
    Trial(setting, phase, step_ms, (step_ms,))
    for setting, phase, step_ms in (
        (RUNNING.untuned, "baseline", 800.0),
        (Setting(1 << 20, 2 << 20), "search", 720.0),
        (Setting(1 << 19, 1 << 20), "search", 700.0),
    )
)
BEGUN = f"""
from dataclasses import replace
from bytesched.tunable import Setting
from bytesched.tuning.file import Trial
memory.save(replace(RUNNING, trials={TRIED!r}))
"""


@pytest.mark.parametrize("options", [[], ["--save", "mine.json"]])
def test_what_a_short_run_has_found_is_kept_and_told(
    options: list[str], cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tune(BEGUN, *options) == 1
    err = capfd.readouterr().err
    assert "best so far: partition 512 KiB, credit 1 MiB, 12.5 % gained" in err
    assert "BYTESCHED_PARTITION_BYTES=524288 BYTESCHED_CREDIT_BYTES=1048576" in err
    memory = Memory(tmp_path / "mine.json") if options else Memory(folder=cache)
    ((path, tuning),) = memory.entries()
    assert tuning.trials == TRIED
    assert f"kept in {path.name if options else path}" in err
