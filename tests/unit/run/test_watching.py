"""What `bytesched run` watches: imports, copies of the script, and nothing to tune."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from warm_python import warm_python

from bytesched.environment import child_environment
from bytesched.run.copies import watch_copies
from bytesched.run.watch import after_import


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules; what is imported from it is forgotten again, and so is who waits."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_called_once_when_the_module_is_complete(folder: Path) -> None:
    (folder / "awaited.py").write_text("first = 1\nlast = 2\n")
    (folder / "user.py").write_text("from awaited import last\n")
    seen: list[int] = []

    def replace(module: Any) -> None:
        seen.append(module.last)
        module.last = 3

    after_import({"awaited": replace})
    assert importlib.import_module("user").last == 3
    awaited = importlib.reload(importlib.import_module("awaited"))
    assert awaited.last == 2
    assert seen == [2]


def test_called_at_once_if_the_module_is_there(folder: Path) -> None:
    (folder / "awaited.py").write_text("")
    module = importlib.import_module("awaited")
    seen: list[Any] = []
    after_import({"awaited": seen.append})
    assert seen == [module]


def test_module_keeps_its_own_loader(folder: Path) -> None:
    for name in ("awaited", "other"):
        (folder / f"{name}.py").write_text("")
    after_import({"awaited": lambda _: None})
    awaited, other = map(importlib.import_module, ("awaited", "other"))
    assert type(awaited.__loader__) is type(other.__loader__)
    assert awaited.__spec__ is not None
    assert awaited.__spec__.loader is awaited.__loader__


def test_import_that_fails_may_be_repeated(folder: Path) -> None:
    (folder / "awaited.py").write_text("raise ValueError")
    seen: list[Any] = []
    after_import({"awaited": seen.append})
    with pytest.raises(ValueError):  # noqa: PT011 - it is the module's own
        importlib.import_module("awaited")
    assert seen == []
    (folder / "awaited.py").write_text("value = 'now it works'")
    importlib.invalidate_caches()
    assert seen == [importlib.import_module("awaited")]


def test_module_that_does_not_exist(folder: Path) -> None:
    after_import({"awaited": print})
    with pytest.raises(ModuleNotFoundError, match="awaited"):
        importlib.import_module("awaited")


def test_two_wait_for_one(folder: Path) -> None:
    (folder / "awaited.py").write_text("")
    seen: list[int] = []
    after_import({"awaited": lambda _: seen.append(1)})
    after_import({"awaited": lambda _: seen.append(2)})
    importlib.import_module("awaited")
    assert sorted(seen) == [1, 2]


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


@pytest.mark.parametrize("tune", ["1", "0"])
def test_a_script_of_ones_own_is_told(tune: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    done = subprocess.run(
        [warm_python(), "-m", "bytesched", "run", "train.py"],
        cwd=tmp_path,
        env=child_environment({"BYTESCHED_TUNE": tune}),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert ("nothing to schedule: the script made neither" in done.stderr) == (tune == "1")
