"""The example of a new route in the documents does what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs/explanation/routes.md"


def test_the_example_of_a_new_route_runs() -> None:
    _, example = PAGE.read_text(encoding="utf-8").split("\n## Adding a route\n")
    (code,) = re.findall(r"```python\n(.*?)```", example, re.DOTALL)
    assert len(code.splitlines()) <= 60
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert sorted(names["sent"]) == ["back", "front", "middle"]
    compressed = [name for what, name in names["carriers"].log if what == "compress"]
    assert compressed == ["back", "front", "middle"], "the first to come, then the most urgent"
    for name in compressed:
        log = names["carriers"].log
        assert log.index(("compress", name)) < log.index(("send", name))
