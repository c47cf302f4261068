"""What every change is tried with, of tests with many cases."""

from __future__ import annotations

import re

from paths import ROOT
from tiers import CASES


def test_each_name_is_a_test_of_its_file() -> None:
    for path, names in CASES.items():
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert names.keys() <= set(re.findall(r"def (test_\w+)\(", text)), path
