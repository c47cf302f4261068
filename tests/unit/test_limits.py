"""Each row of the limits says what becomes of a situation, and names tests that there are."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT

TESTS = ROOT / "tests"
PAGE = (ROOT / "docs" / "reference" / "limits.md").read_text()
LINES = [line[2:-2].split(" | ") for line in PAGE.splitlines() if re.match(r"\| [^|]", line)]
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
    assert named or row[3] == "not tested"
    assert len(named) == row[3].count("::")
    file = ""
    for given, name in named:
        file = given or file
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), name
        if file.startswith("scripts/") and Path(file).stem not in EVERY:
            assert re.search(rf"\b{name}\b", _procs()), name
