"""What every change is tried with, of tests with many cases."""

from __future__ import annotations

import re

import pytest
from paths import ROOT
from tiers import CASES, Tiers


@pytest.mark.parametrize("path", CASES)
def test_each_name_is_a_test_of_its_file(path: str) -> None:
    text = (ROOT / "tests" / path).read_text(encoding="utf-8")
    tests = set(re.findall(r"def (test_\w+)\(", text))
    assert CASES[path].keys() <= tests


def test_each_second_case() -> None:
    path, tiers = "procs/transparency/test_rounds.py", Tiers()
    assert [tiers.is_nightly(path, "test_script") for _ in range(4)] == [False, True, False, True]


def test_none_and_all() -> None:
    tiers = Tiers()
    assert tiers.is_nightly("procs/hazards/test_drawn.py", "test_some_turns")
    assert not tiers.is_nightly("procs/hazards/test_drawn.py", "test_an_end_is_heard_of_at_once")
