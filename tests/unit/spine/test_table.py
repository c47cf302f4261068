"""Tables of the commands."""

from __future__ import annotations

import pytest

from bytesched.table import aligned


def test_columns_are_as_wide_as_their_widest_cells() -> None:
    rows = [("system", "ms", "losses"), ("ddp", "1000.5", ""), ("fsdp2", "9.0", "identical")]
    assert aligned(rows, "<><") == [
        "system      ms  losses",
        "ddp     1000.5",
        "fsdp2      9.0  identical",
    ]
    assert aligned([], "") == []


def test_a_row_with_another_number_of_cells_is_an_error() -> None:
    with pytest.raises(ValueError, match="argument"):
        aligned([("a", "b"), ("c",)], "<<")
    with pytest.raises(ValueError, match="argument"):
        aligned([("a", "b")], "<")
