"""The example of the page about plans."""

from __future__ import annotations

import re

import pytest
from paths import ROOT


def test_the_example_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "explanation" / "plans.md").read_text()
    [(code, printed)] = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "plans.md", "exec"), {})
    assert capsys.readouterr().out == printed
