"""Gradients that a script reduces itself, although the session has done so, are spoken of."""

from __future__ import annotations

import by_hand_scripts as scripts
import pytest
from ranks import Ranks


@pytest.mark.parametrize("mode", scripts.MODES)
def test_a_script_that_reduces_all_gradients_is_told_once(two_ranks: Ranks, mode: str) -> None:
    names = [script.__name__ for script in scripts.BY_HAND]
    of_leader, of_other = two_ranks.run(scripts.said, mode, names)
    for name, lines in of_leader.items():
        assert len(lines) == 1, (name, lines)
        assert "by_hand_scripts.py:" in lines[0]
        assert "sent twice" in lines[0]
    assert of_other == {name: [] for name in names}


@pytest.mark.parametrize("mode", ["ddp", "split"])
def test_other_reductions_are_not_spoken_of(two_ranks: Ranks, mode: str) -> None:
    names = [script.__name__ for script in scripts.NOT_BY_HAND]
    nothing: dict[str, list[str]] = {name: [] for name in names}
    assert two_ranks.run(scripts.said, mode, names) == [nothing, nothing]


def test_what_one_step_does_is_not_spoken_of(two_ranks: Ranks) -> None:
    assert two_ranks.run(scripts.said_once, "flat") == [[], []]


def test_what_was_not_synchronised_is_reduced_by_hand_in_peace(two_ranks: Ranks) -> None:
    assert two_ranks.run(scripts.said_without_sync) == [[], []]
