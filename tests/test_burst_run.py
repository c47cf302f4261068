"""The burst runtime: any plan trains as data parallelism does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

import burst_cases

if TYPE_CHECKING:
    from ranks import Ranks

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("name", burst_cases.CASES)
def test_a_plan_trains_as_data_parallelism_does(name: str, four_ranks: Ranks) -> None:
    figures = four_ranks.run(burst_cases.equals_data_parallel, name)
    if name != "vgg-uniform":
        assert figures[0]["move_bytes"] > 0
        assert figures[3]["move_wait_ms"] > 0
    else:
        assert figures[0]["move_bytes"] == 0
        assert figures[0]["mode/4"] == "cross"


def test_training_begins_with_the_weights_of_rank_0(four_ranks: Ranks) -> None:
    first, *others = four_ranks.run(burst_cases.first_weights_are_rank_0s)
    assert others == [first] * 3


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("ranks", "planned for ranks 0 to 7, and there are 4 ranks"),
        ("length", "the plan has 3 layers for the model, which has 4"),
        ("norm", "use nn.GroupNorm"),
        ("shared", "2 and 3 share a parameter"),
        ("plans", "MismatchError: rank 0 and rank 3 have different plans"),
    ],
)
def test_what_cannot_be_run_is_refused(what: str, message: str, four_ranks: Ranks) -> None:
    for said in four_ranks.run(burst_cases.refused, what):
        assert message in said
