"""The documents: their Python compiles, their links lead somewhere, their tables are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

from bytesched import cli
from bytesched.config import FIELDS
from bytesched.testing import STATS

DOCUMENTS = [ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_compiles(document: Path) -> None:
    for language, code in BLOCK.findall(document.read_text()):
        if language == "python":
            compile(code, document.name, "exec")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = BLOCK.sub("", document.read_text())
    for target in LINK.findall(text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = document.parent / file if file else document
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}
            assert anchor in slugs, target


def test_readme_tells_every_field_and_its_default() -> None:
    text = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, re.MULTILINE))
    assert list(rows) == list(FIELDS)
    for name, shown in rows.items():
        assert shown == repr(FIELDS[name].default).replace("'", '"'), name


def test_readme_tells_every_figure() -> None:
    section = (ROOT / "README.md").read_text().partition("### Figures")[2].partition("\n## ")[0]
    told = re.findall(r"`([\w/<>]+)`", " ".join(re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)))
    assert set(told) == {*STATS, "wait_ms/<module>"}


def test_readme_tells_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    for name in cli.COMMANDS:
        assert f"bytesched {name}" in text


def test_changelog_begins_with_unreleased() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
