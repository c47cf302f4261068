"""What every change is tried with, of tests with many cases."""

from __future__ import annotations

import pytest
from tiers import is_tried


@pytest.mark.parametrize("ways", [2, 3, 4, 6])
def test_each_value_of_each_parameter_is_tried(ways: int) -> None:
    scripts = 12
    tried = [
        divmod(number, ways)
        for number in range(scripts * ways)
        if is_tried(number, [ways, scripts], ways)
    ]
    # Each script once, and each way as often.
    assert [script for script, _ in tried] == list(range(scripts))
    assert sorted(way for _, way in tried) == sorted([*range(ways)] * (scripts // ways))
