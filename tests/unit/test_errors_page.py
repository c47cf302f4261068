"""The page about errors has every class, and shows messages that the code really has."""

from __future__ import annotations

import ast
import re

from paths import ROOT, product

from bytesched import errors

PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
#: stands for a value in a message
GAP = "…"


def _error_classes() -> set[str]:
    """Every `BytesschedError` of the product, also where its module cannot be imported."""
    known: set[str] = set()
    more = {errors.BytesschedError.__name__}
    classes = [n for tree in product().values() for n in ast.walk(tree) if type(n) is ast.ClassDef]
    while more - known:
        known |= more
        more = {n.name for n in classes if known & {ast.unparse(base) for base in n.bases}}
    return known


def test_every_error_class_stands_on_the_page() -> None:
    classes = _error_classes()
    public = {name for name, item in vars(errors).items() if isinstance(item, type)}
    assert public | {"HorovodPeerLost"} <= classes | {"Sequence"}
    headings = set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
    rows = set(re.findall(r"^\| `(\w+)` \| `", PAGE, re.MULTILINE))
    assert [n for n in classes if n not in (headings if hasattr(errors, n) else rows)] == []


def _texts() -> str:
    """All strings of the code, a line each, with gaps where values stand."""
    texts = []
    for tree in product().values():
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


def test_messages_are_those_of_the_code() -> None:
    shown, texts = _shown(), _texts()
    assert len(shown) > 80
    assert [message for message in shown if message.strip(f"{GAP} ") not in texts] == []
