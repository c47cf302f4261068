"""Where the tests and the project are."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
SCRIPTS = SUPPORT.parent / "scripts"
ROOT = SUPPORT.parents[1]
