"""Which commands are copies of the script, and how they are started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bytesched.run.copies import watch_copies


class Popen:
    """As the real one, without a child."""

    started: list[Any]

    def __init__(
        self,
        args: Any,
        bufsize: int = -1,
        executable: Any = None,
        cwd: Any = None,
        *,
        shell: bool = False,
    ) -> None:
        self.args = args
        self.started = args


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("")
    (tmp_path / "other.py").write_text("")
    return path


def started(program: str, args: Any, *others: Any, is_module: bool = False, **named: Any) -> Any:
    """What is started for ``Popen(args, ...)`` by the script ``program``."""
    kind = type("Popen", (Popen,), {"__init__": Popen.__init__})
    module: Any = ModuleType("subprocess")
    module.Popen = kind
    watch_copies(module, program, is_module=is_module)
    child = module.Popen(args, *others, **named)
    assert child.args is args
    return child.started


def is_copy(program: str, args: Any, *others: Any, is_module: bool = False, **named: Any) -> bool:
    got = started(program, args, *others, is_module=is_module, **named)
    if got is args:
        return False
    at = got.index("-c")
    assert "run_copy" in got[at + 1]
    assert [*got[:at], *got[at + 2 :]] == [os.fspath(word) for word in args]
    return True


def test_copies_of_the_script(script: Path) -> None:
    for args in (
        [sys.executable, str(script)],
        [sys.executable, script, "--lr", "0.1"],
        (sys.executable, "train.py"),
        [sys.executable, "-u", "-W", "ignore", "-X", "utf8", "train.py", "-m", "x"],
    ):
        assert is_copy("train.py", args), args
    assert is_copy("train.py", [sys.executable, "train.py"], cwd=script.parent)
    assert is_copy("train.py", [sys.executable, "train.py"], -1, None, script.parent)


def test_copies_of_the_module() -> None:
    assert is_copy("pack.train", [sys.executable, "-m", "pack.train"], is_module=True)
    assert is_copy("pack", [sys.executable, "-m", "pack.__main__", "x"], is_module=True)
    assert not is_copy("pack", [sys.executable, "-m", "pack.other"], is_module=True)


def test_other_commands_are_left_alone(script: Path, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for args in (
        [sys.executable, "other.py"],
        [sys.executable, "missing.py"],
        [sys.executable, "-c", "pass", "train.py"],
        [sys.executable, "-m", "train"],
        [sys.executable],
        [sys.executable, "-W"],
        ["ls", "train.py"],
        ["no such program", "train.py"],
        [],
        f"{sys.executable} train.py",
        [sys.executable, 3],
    ):
        assert not is_copy("train.py", args), args
    args = [sys.executable, "train.py"]
    assert not is_copy("train.py", args, shell=True)
    assert not is_copy("train.py", args, executable="/bin/false")
    assert not is_copy("train.py", args, cwd=tmp_path / "below")


def test_wrong_arguments_are_refused_by_popen_itself(script: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        started("train.py", [sys.executable, "train.py"], speed=3)
