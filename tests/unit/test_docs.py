"""The documents: their Python compiles, their links lead somewhere, their lists are the code's."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess

from paths import ROOT
from plugin_suite import STATS
from public import PUBLIC

from bytesched import cli, config, figures
from bytesched.config import FIELDS

TOP = [ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?:^|[\s`./])((?:examples|scripts|tests)/[\w./-]*\w)")
#: what is in the history alone
PAST = re.compile(r"((?:`[^`]+`(?:,| and)?\s+)+)at\s+commit\s[0-9a-f]{7}")
MODULE = re.compile(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`")
LAYERS = [ROOT / "docs" / "design.md", *sorted((ROOT / "docs" / "explanation").glob("*.md"))]
LONGEST_README = 110
#: what is generated, by the page that has a place for it
PLACES = {
    "reference/settings.md": "settings",
    "reference/figures.md": "figures",
    "reference/commands.md": "commands",
    "how-to/waiting.md": "reasons",
}


def _documents() -> dict[str, str]:
    """The text of each document by its name."""
    paths = TOP + sorted((ROOT / "docs").rglob("*.md"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def test_python_compiles() -> None:
    for name, text in _documents().items():
        for language, code in BLOCK.findall(text):
            if language == "python":
                compile(code, name, "exec")


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def test_links_lead_somewhere() -> None:
    dead = []
    for name, text in _documents().items():
        for target in LINK.findall(BLOCK.sub("", text)):
            file, _, anchor = target.partition("#")
            path = (ROOT / name).parent / file if file else ROOT / name
            if "://" not in target and not (
                path.exists() and (not anchor or anchor in _anchors(path.read_text()))
            ):
                dead.append(f"{name}: {target}")
    assert dead == []


def test_files_that_are_named_exist() -> None:
    missing = [
        f"{document}: {name}"
        for document, text in _documents().items()
        if not document.startswith("docs/notes/")
        # Tests in limits are named from their folder on: see test_limits.
        for name in set(FILE.findall(re.sub(r"`[\w/]*\.py::", "`", text)))
        - set(FILE.findall(" ".join(PAST.findall(text))))
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_modules_that_a_layer_names_exist() -> None:
    """Of several in one line, later ones may be named by their file alone."""
    missing = []
    for document in LAYERS:
        for line in document.read_text().splitlines():
            folder = ROOT
            for name in MODULE.findall(line):
                found = next((p for p in (ROOT / name, folder / name) if p.exists()), None)
                if found is not None:
                    folder = found.parent
                elif folder != ROOT or "/" in name:
                    missing.append(f"{document.name}: {name}")
    assert missing == []


def test_every_page_can_be_reached() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [name.removeprefix("docs/") for name in _documents() if name.startswith("docs/")]
    assert [p for p in pages if not p.startswith("notes/") and f" {p}\n" not in navigation] == []


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


def test_pages_have_a_place_for_what_is_generated() -> None:
    texts = _documents()
    assert [p for p, name in PLACES.items() if f"<!-- {name} -->" not in texts[f"docs/{p}"]] == []


def test_every_public_name_stands_in_the_reference() -> None:
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    text = " ".join(path.read_text() for path in pages)
    names = [f"{module}.{name}" for module in PUBLIC for name in PUBLIC[module]]
    assert [name for name in names if not re.search(rf"::: {name}\b", text)] == []


def test_every_command_has_a_line_and_a_use() -> None:
    text = " ".join(_documents().values())
    assert all(command.line for command in cli.COMMANDS.values())
    assert [n for n in cli.COMMANDS if not re.search(rf"bytesched {n}\b", text)] == []


def test_changelog_begins_with_unreleased() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
