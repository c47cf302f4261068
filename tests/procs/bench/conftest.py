"""A folder for runs of the bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny import TINY

if TYPE_CHECKING:
    from small_benches import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """One with a model in tiny.json."""
    from small_benches import Bench

    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    return Bench(tmp_path)
