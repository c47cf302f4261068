"""The documents: their Python compiles, their links lead somewhere, their lists are the code's.

The page about errors shows messages that the code has, each row of the limits names its tests, and
the times of the results are those of their files.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT, product
from plugin_suite import STATS
from public import PUBLIC

from bytesched import cli, config, errors, figures
from bytesched.bench.specification import bench_parser
from bytesched.bench.systems import parse_systems
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
        # Tests in limits are named from their folder on: see below.
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


ERRORS = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
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
    headings = set(re.findall(r"^## (\w+)$", ERRORS, re.MULTILINE))
    rows = set(re.findall(r"^\| `(\w+)` \| `", ERRORS, re.MULTILINE))
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
    for line in ERRORS.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) > 2 and "[" not in cells[0]:
            found += re.findall(r"`([^`]*\s[^`]*)`", cells[len(cells) - 3])
    return found


def test_messages_are_those_of_the_code() -> None:
    shown, texts = _shown(), _texts()
    assert len(shown) > 80
    assert [message for message in shown if message.strip(f"{GAP} ") not in texts] == []


TESTS = ROOT / "tests"
LIMITS = (ROOT / "docs" / "reference" / "limits.md").read_text()
LINES = [line[2:-2].split(" | ") for line in LIMITS.splitlines() if re.match(r"\| [^|]", line)]
#: situation, plain DDP, bytesched, tested by; the grid has more columns
ROWS = [cells for cells in LINES if len(cells) == 4 and cells[0] != "situation"]
WORDS = ("equal", "barrier kept", "left to DDP", "refused", "differs (said)", "differs (unsaid)")
#: files whose scripts are all run
EVERY = re.findall(
    r"^import (scripts_\w+)", (TESTS / "scripts" / "soak_cases.py").read_text(), re.MULTILINE
)
NAMED = re.compile(r"`([\w/]*\.py)?::(\w+)`")


@cache
def _procs() -> str:
    return "".join(path.read_text() for path in (TESTS / "procs").rglob("test_*.py"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_has_its_word_and_its_tests(row: list[str]) -> None:
    assert row[2].startswith(tuple(f"**{word}**" for word in WORDS))
    named = NAMED.findall(row[3])
    assert named
    assert len(named) == row[3].count("::")
    file = ""
    for given, name in named:
        file = given or file
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), name
        if file.startswith("scripts/") and Path(file).stem not in EVERY:
            assert re.search(rf"\b{name}\b", _procs()), name


RESULT_FILES = {path.stem: path for path in sorted((ROOT / "docs" / "results").glob("*.json"))}
RESULTS = (ROOT / "docs" / "results.md").read_text()
#: the file that a row links to, its T*, and all that follows
RESULT_ROW = re.compile(
    r"^\| \[[^\]]+\]\(results/([\w-]+)\.json\) \| ([^|]+) \| (.+) \|$", re.MULTILINE
)
RESULT_ROWS: dict[str, tuple[str, str]] = {
    file: (bound, rest) for file, bound, rest in RESULT_ROW.findall(RESULTS)
}
#: a script had this command: MXNet needs an environment of its own
NOT_OF_THE_BENCH = {"stores-mxnet-1-gpt"}
#: has a table of its own
PREDICTIONS = "predictions"


def found(file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RESULT_FILES[file].read_text())
    return content


def test_every_file_has_a_row() -> None:
    assert RESULT_ROWS.keys() | {PREDICTIONS} == RESULT_FILES.keys()


def test_the_times_of_a_row_are_those_of_its_file() -> None:
    for file, (bound, rest) in RESULT_ROWS.items():
        compute = found(file)["compute"]
        bounds = [compute.get(name) for name in ("optimum_ms", "pieces_optimum_ms")]
        assert bound == " / ".join(f"{ms:.1f}" for ms in bounds if ms), file
        times = set(re.findall(r"(?<=\| )\d+\.\d(?= )", f"| {rest} |".replace("**", "")))
        systems = found(file)["systems"]
        # What sends no gradients stands beside them, with its exchanges alone.
        shown = {its["figures"]["iteration_ms"] for name, its in systems.items() if name != "idle"}
        assert times == {f"{ms:.1f}" for ms in shown}, file


def test_predictions_are_those_of_their_file() -> None:
    for row in found(PREDICTIONS)["rows"]:
        measured, predicted = row["measured_ms"], row["predicted_ms"]
        cells = [
            f"{ms:.1f} / {measured[name]:.1f} ({100 * (ms / measured[name] - 1):+.1f} %)"
            for name, ms in predicted.items()
        ]
        line = [f"{row['hosts']}, {row['model']}", f"{row['optimum_ms']:.1f}", *cells]
        assert f"| {' | '.join(line)} |" in RESULTS


def test_commands_are_understood() -> None:
    for file in RESULT_ROWS.keys() - NOT_OF_THE_BENCH:
        words = shlex.split(found(file)["command"])
        options = bench_parser().parse_args(words[words.index("bench") + 1 :])
        assert parse_systems(options.systems), file
