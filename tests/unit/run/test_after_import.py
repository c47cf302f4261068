"""Functions that wait for the import of a module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
