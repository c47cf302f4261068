"""Model-parallel waves: the results of one process, the memory of a part of the model."""

from __future__ import annotations

import pytest
from ranks import Ranks, run_fresh
from wave_model_cases import (
    dies_while_it_receives,
    model_waves_equal,
    rank_dies,
    refusals,
    state_dict_fails,
    updates_equal,
    used_after_they_were_closed,
    user_error,
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process_with_all_batches(ranks: int, request: pytest.FixtureRequest) -> None:
    pool: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    for wrong, figures in pool.run(model_waves_equal):
        assert wrong == []
        assert figures["home_bytes"] < figures["peak_bytes"] <= figures["bound_bytes"]
        assert figures["sent_bytes_per_step"] > 0


@pytest.mark.parametrize("kind", ["", "clipped", "scaled"])
def test_what_looks_at_all_gradients_equals_one_process(kind: str, two_ranks: Ranks) -> None:
    assert two_ranks.run(updates_equal, kind) == [[], []]


def test_refuses_what_cannot_be_cut_and_ranks_that_disagree(two_ranks: Ranks) -> None:
    for told in two_ranks.run(refusals):
        assert not [line for line in told if "and left" in line]
        few, shared, elsewhere, stranger, different, settings = told
        assert few.startswith("PluginError: the model is cut into 2 stages")
        assert shared.startswith("PluginError: layers 0 and 2 share a parameter")
        assert elsewhere.startswith("PluginError: the model is on meta")
        assert stranger.startswith(
            "PluginError: the optimizer has 1 parameters that the model has not, of shapes [(3,)]"
        )
        assert different.startswith("MismatchError: the ranks disagree: rank 0 has '0.weight")
        assert "rank 1 has 'partition_bytes = 512'" in settings


def test_a_rank_that_dies_is_a_named_error_on_all_others() -> None:
    *survivors, dead = run_fresh(rank_dies, world_size=3, timeout_s=50)
    assert dead.code == -9
    for survivor in survivors:
        assert survivor.stdout.strip() == "PeerLost", survivor.stderr
        assert survivor.code == 0


def test_a_rank_that_dies_in_the_middle_of_the_last_message_is_missed() -> None:
    _, survivor = run_fresh(dies_while_it_receives, timeout_s=45.0)
    assert survivor.stdout.strip() == "PeerLost", survivor.stderr
    assert survivor.code == 0


def test_an_exception_of_one_rank_is_told_to_the_others(two_ranks: Ranks) -> None:
    other, own = two_ranks.run(user_error)
    assert own == "ValueError: no such target"
    assert "rank 1 said: ValueError: no such target" in other


def test_a_state_dict_that_fails_on_one_rank_fails_on_all_at_once(two_ranks: Ranks) -> None:
    other, own = two_ranks.run(state_dict_fails)
    assert own == "OSError: no room"
    assert other.startswith("PeerLost")
    assert "rank 1 said: OSError: no room" in other


def test_closed_waves_and_settings_that_do_nothing_say_so(two_ranks: Ranks) -> None:
    for rank, told in enumerate(two_ranks.run(used_after_they_were_closed)):
        *warnings, step, predict, state_dict = told
        for said, name in ((step, "step"), (predict, "predict"), (state_dict, "state_dict")):
            assert said == f"rank {rank}: {name}() of closed ModelWaves; make new ones"
        unused = "enabled = False (code), compression = 'fp16' (code)"
        assert warnings == ([] if rank else [f"bytesched: ModelWaves does not use {unused}"])
