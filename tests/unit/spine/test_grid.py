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
    assert len(set(cells())) == 24
    # No setting asks for another wire.
    for cell in [cell for cell in cells() if cell.wire == "messages"]:
        error = refusal(cell)
        assert (error is None) == (not why_not(cell))
        if error is not None:
            assert type(error) is ConfigError
            assert why_not(cell) in str(error)


def test_what_settings_cannot_have_they_have_on_no_wire() -> None:
    """They are refused before anybody knows what carries gradients."""
    for cell in cells():
        if why := why_not(cell._replace(wire="messages")):
            assert why_not(cell) == why


def test_settings_name_their_cell() -> None:
    assert Config().cell == Cell("whole", "flat", "given")
    assert Config(split="on").cell == Cell("split", "flat", "given")
    assert Config(tune=True).cell == Cell("whole", "flat", "tuned")
    assert Config(shard=True).cell == Cell("sharded", "flat", "given")
    assert Config(hierarchy="on").cell == Cell("whole", "two levels", "given")
