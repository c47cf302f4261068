"""What `bytesched run` does to Horovod scripts that nobody has touched."""

from __future__ import annotations

import pytest
from horovod_launched import why_missing
from run_outcomes import SMALL, Outcomes, left, outcomes, selected

pytestmark = [pytest.mark.procs, pytest.mark.needs("horovod")]

MODES = {
    "usual": ["cross"],
    "resumed": ["cross"],
    "one_rank_has_other_settings": [],
    "called_by_one_rank": ["cross"],
    "inside_a_trainer": ["cross"],
    "two_models": ["cross", "cross"],
    "clipped_and_accumulated": ["cross"],
    "compiled_first": ["cross"],
    "compiled_later": ["cross"],
    "parameters_of_several_models": [],
    "no_module": [],
    "wrapped_by_the_script": ["cross"],
}
NO_MODULE = "no module contains all of its parameters"
REASONS = {
    "parameters_of_several_models": NO_MODULE,
    "no_module": NO_MODULE,
    "one_rank_has_other_settings": "rank 1 has \"policy = 'fifo'\"",
}


#: whose settings are looked at
WITH_SETTINGS = ("wrapped_by_the_script", "usual")


@pytest.fixture(scope="module")
def both_ranks(request: pytest.FixtureRequest) -> list[Outcomes]:
    if reason := why_missing("gloo"):
        pytest.skip(reason)
    import run_horovod_cases
    from horovod_forked import run_forked

    names = selected(request, MODES, WITH_SETTINGS)
    ranks = run_forked(run_horovod_cases.run_all, env=SMALL, args=(names,))
    return [outcomes(rank) for rank in ranks]


@pytest.mark.parametrize("name", MODES)
@pytest.mark.one_in(2)
def test_trains_as_without(both_ranks: list[Outcomes], name: str) -> None:
    for rank, cases in enumerate(both_ranks):
        assert not cases[name]["different"], f"rank {rank}"
        assert cases[name]["modes"] == MODES[name]
    said, others = (cases[name]["said"] for cases in both_ranks)
    assert others == []
    assert len(left(said)) == (name in REASONS)
    assert REASONS.get(name, "") in "".join(left(said))


def test_settings_of_the_script_come_first(both_ranks: list[Outcomes]) -> None:
    said = [both_ranks[0][name]["said"][-1] for name in WITH_SETTINGS]
    assert "policy fifo" in said[0]
    assert "policy priority" in said[1]
