"""The documents: their Python compiles, their links lead somewhere, their lists are the code's."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest
from paths import ROOT
from public import PUBLIC

from bytesched import cli, config, figures
from bytesched.config import FIELDS
from bytesched.testing import STATS

TOP = [ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS = TOP + sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?:^|[\s`./])((?:examples|scripts|tests)/[\w./-]*\w)")
#: what is in the history alone
PAST = re.compile(r"((?:`[^`]+`(?:,| and)?\s+)+)at\s+commit\s[0-9a-f]{7}")
MODULE = re.compile(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`")
LAYERS = [ROOT / "docs" / "design.md", *sorted((ROOT / "docs" / "explanation").glob("*.md"))]
LONGEST_README = 110

every_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


@every_document
def test_python_compiles(document: Path) -> None:
    for language, code in BLOCK.findall(document.read_text()):
        if language == "python":
            compile(code, document.name, "exec")


def _anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(BLOCK.sub("", document.read_text())):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = document.parent / file if file else document
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), target


@every_document
def test_files_that_are_named_exist(document: Path) -> None:
    if document.parent.name != "notes":
        text = document.read_text()
        if document.stem == "limits":
            # Whose tests are named from their folder on: see test_limits.
            text = re.sub(r"`[\w/]*\.py::", "`", text)
        past = FILE.findall(" ".join(PAST.findall(text)))
        for name in FILE.findall(text):
            assert name in past or (ROOT / name).exists(), name


@pytest.mark.parametrize("document", LAYERS, ids=lambda path: path.stem)
def test_modules_that_a_layer_names_exist(document: Path) -> None:
    """Of several in one line, later ones may be named by their file alone."""
    for line in document.read_text().splitlines():
        folder = ROOT
        for name in MODULE.findall(line):
            found = next((p for p in (ROOT / name, folder / name) if p.exists()), None)
            assert found is not None or (folder == ROOT and "/" not in name), name
            folder = found.parent if found is not None else folder


def test_every_page_can_be_reached() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = str(page.relative_to(ROOT / "docs"))
        assert name.startswith("notes/") or f" {name}\n" in navigation, name


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


def test_worked_changes_still_apply() -> None:
    """Those of CONTRIBUTING, to the files as they are."""
    blocks = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
    diffs = [code for language, code in blocks if language == "diff"]
    assert len(diffs) == 3
    for diff in diffs:
        tried = subprocess.run(
            ["git", "apply", "--check", "-"],
            cwd=ROOT,
            input=diff,
            capture_output=True,
            text=True,
            check=False,
        )
        assert tried.returncode == 0, tried.stderr


def _documented(cls: type) -> set[str]:
    """The attributes of a class that have a docstring below them."""
    [node] = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    return {
        field.target.id
        for field, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def test_every_setting_is_documented() -> None:
    assert _documented(config.Config) == set(FIELDS)


def test_every_figure_is_documented() -> None:
    assert _documented(figures.Figures) == set(STATS)


@pytest.mark.parametrize("name", ["settings", "figures", "commands"])
def test_reference_has_a_place_for_what_is_generated(name: str) -> None:
    assert f"<!-- {name} -->" in (ROOT / "docs" / "reference" / f"{name}.md").read_text()


def test_page_about_waiting_has_a_place_for_the_reasons() -> None:
    assert "<!-- reasons -->" in (ROOT / "docs" / "how-to" / "waiting.md").read_text()


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_stands_in_the_reference(module: str) -> None:
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    text = " ".join(path.read_text() for path in pages)
    for name in PUBLIC[module]:
        # What is documented under its present name is listed with the one it had before.
        assert f"::: {module}.{name}" in text or f"`{module}` has" in text, name


def test_every_command_has_a_line_and_a_use() -> None:
    texts = " ".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for name, command in cli.COMMANDS.items():
        assert command.line
        assert re.search(rf"bytesched {name}\b", texts), name


def test_changelog_begins_with_unreleased() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
