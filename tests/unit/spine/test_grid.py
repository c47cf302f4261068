"""The grid of ways for gradients: one table, one error, and the documents show it."""

from __future__ import annotations

from paths import ROOT

from bytesched.config import Config
from bytesched.errors import ConfigError
from bytesched.grid import Cell, as_markdown, cells, refusal, why_not


def test_documents_show_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "limits.md").read_text(encoding="utf-8")
    assert as_markdown() in page


def test_every_cell_works_or_has_the_one_error() -> None:
    assert len(set(cells())) == 12
    for cell in cells():
        error = refusal(cell)
        assert (error is None) == (not why_not(cell))
        if error is not None:
            assert type(error) is ConfigError
            assert why_not(cell) in str(error)


def test_settings_name_their_cell() -> None:
    assert Config().cell == Cell("whole", "flat", "given")
    assert Config(split="on").cell == Cell("split", "flat", "given")
    assert Config(tune=True).cell == Cell("whole", "flat", "tuned")
    assert Config(shard=True).cell == Cell("sharded", "flat", "given")
    assert Config(hierarchy="on").cell == Cell("whole", "two levels", "given")
