"""Where the tests and the project are."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SUPPORT = Path(__file__).parent
SCRIPTS = SUPPORT.parent / "scripts"
ROOT = SUPPORT.parents[1]


@cache
def product() -> dict[str, ast.Module]:
    """The source files of the product, each once although links lead to some of them."""
    paths = [p for top in ("bytesched", "plugins", "tuning") for p in (ROOT / top).rglob("*.py")]
    links = {ROOT / "bytesched" / name for name in ("plugins", "tuning")}
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"), str(path))
        for path in sorted(paths)
        if not links & set(path.parents)
    }
