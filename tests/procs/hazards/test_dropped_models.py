"""A session ends with its model."""

from __future__ import annotations

import itertools

import dropped_models as dropped
import pytest
from ranks import Ranks

#: of one more model that is wrapped: Gloo's that send, and those of the session itself
THREADS_PER_MODEL = 7


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.one_in(2)
def test_nothing_stays_of_a_model_that_was_dropped(two_ranks: Ranks, reads: bool) -> None:
    for found in two_ranks.run(dropped.dropped_in_turn, 4, reads):
        assert not found


def test_a_further_model_costs_few_threads(two_ranks: Ranks) -> None:
    for numbers in two_ranks.run(dropped.threads_of, 4):
        further = [after - before for before, after in itertools.pairwise(numbers[1:])]
        assert max(further) <= THREADS_PER_MODEL, numbers


def test_the_last_step_of_a_dropped_model_is_applied(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(dropped.last_step_of_a_dropped_model))


def test_a_model_outlives_its_first_optimizer(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(dropped.another_optimizer))


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_trains_on_after_the_other_unwraps_is_not_left_waiting(
    two_ranks: Ranks, leaver: int
) -> None:
    """The last messages of who leaves once kept its connections open."""
    ends = two_ranks.run(dropped.left_alone, leaver)
    raised = ends[1 - leaver]
    assert raised.startswith(f"PeerLost: rank {leaver} on "), raised
    assert not ends[leaver]
