"""The page about errors has every class, and shows messages that the code really has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT

from bytesched import errors

PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
#: stands for a value in a message
GAP = "…"


def _modules() -> Iterator[Path]:
    for folder in ("bytesched", "plugins", "tuning"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in (path, *path.parents)):
                yield path


@cache
def _trees() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in _modules())


def _error_classes() -> list[str]:
    """Every `BytesschedError` of the product, also where its module cannot be imported."""
    known = {errors.BytesschedError.__name__}
    classes = [n for tree in _trees() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    while True:
        more = {
            node.name
            for node in classes
            if known & {base.id for base in node.bases if isinstance(base, ast.Name)}
        }
        if more <= known:
            return sorted(known)
        known |= more


@pytest.mark.parametrize("name", _error_classes())
def test_every_error_class_stands_on_the_page(name: str) -> None:
    heading, row = rf"^## {name}$", rf"^\| `{name}` \| `"
    assert re.search(heading if hasattr(errors, name) else row, PAGE, re.MULTILINE), name


def test_public_errors_are_found() -> None:
    public = {name for name, item in vars(errors).items() if isinstance(item, type)}
    assert public <= {*_error_classes(), "Sequence"}
    assert "HorovodPeerLost" in _error_classes()


@cache
def _texts() -> str:
    """All strings of the code, a line each, with gaps where values stand."""
    texts = []
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else GAP for p in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return re.sub(rf"'?{GAP}'?", GAP, "\n".join(texts))


def _shown() -> list[str]:
    """The messages in the tables of the page."""
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) > 2 and "[" not in cells[0]:
            found += re.findall(r"`([^`]*\s[^`]*)`", cells[len(cells) - 3])
    return found


def test_many_messages_are_shown() -> None:
    assert len(_shown()) > 80


@pytest.mark.parametrize("message", _shown())
def test_messages_are_those_of_the_code(message: str) -> None:
    assert message.strip(f"{GAP} ") in _texts(), message
