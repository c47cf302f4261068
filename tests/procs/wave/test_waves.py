"""Waves of one rank equal gradient accumulation, those of ranks one process with all batches."""

from __future__ import annotations

from typing import Any

import pytest
import wave_cases as ticktock
import wave_model_cases as model_waves
from raised import check_survivors
from ranks import Ranks, run_fresh

pytestmark = pytest.mark.usefixtures("one_thread")


#: two ranks find no difference in these to accumulation, or to one process with all batches
EQUAL: list[tuple[Any, ...]] = [
    *((ticktock.ddp_equal, waves, wrapped) for waves in (2, 3) for wrapped in (False, True)),
    *((ticktock.ddp_equal, 2, wrapped, True) for wrapped in (False, True)),
    (ticktock.seldom_used_under_wrap,),
    *((model_waves.updates_equal, kind) for kind in ("", "clipped", "scaled")),
]


@pytest.mark.parametrize(
    "case", EQUAL, ids=lambda case: "-".join([case[0].__name__, *map(str, case[1:])])
)
@pytest.mark.one_in(2)
def test_ranks_equal_accumulation(two_ranks: Ranks, case: tuple[Any, ...]) -> None:
    assert two_ranks.run(*case) == [[], []]


def test_ranks_that_are_switched_off_accumulate(two_ranks: Ranks) -> None:
    assert two_ranks.run(ticktock.switched_off) == [(False, []), (False, [])]
    for said in two_ranks.run(ticktock.refused_where_it_is_off):
        assert "nothing synchronises the gradients of the 2 ranks, and enabled is off" in said


def test_ddp_that_looks_for_unused_parameters_accumulates(two_ranks: Ranks) -> None:
    assert two_ranks.run(ticktock.left_to_accumulation) == [(False, []), (False, [])]


def test_ranks_that_would_train_apart_are_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(ticktock.refused_where_nothing_sends):
        assert "nothing synchronises the gradients of the 2 ranks" in message


def test_a_rank_that_dies_in_a_wave_is_a_named_error() -> None:
    check_survivors(run_fresh(ticktock.peer_dies, timeout_s=40))


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process_with_all_batches(ranks: int, request: pytest.FixtureRequest) -> None:
    pool: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    for wrong, figures in pool.run(model_waves.model_waves_equal):
        assert wrong == []
        assert figures["home_bytes"] < figures["peak_bytes"] <= figures["bound_bytes"]
        assert figures["sent_bytes_per_step"] > 0


def test_refuses_what_cannot_be_cut_and_ranks_that_disagree(two_ranks: Ranks) -> None:
    for told in two_ranks.run(model_waves.refusals):
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
    check_survivors(run_fresh(model_waves.rank_dies, world_size=3, timeout_s=50))


@pytest.mark.nightly
def test_a_rank_that_dies_in_the_middle_of_the_last_message_is_missed() -> None:
    check_survivors(run_fresh(model_waves.dies_while_it_receives, timeout_s=45.0), victim=0)


def test_an_exception_of_one_rank_is_told_to_the_others(two_ranks: Ranks) -> None:
    other, own = two_ranks.run(model_waves.user_error)
    assert own == "ValueError: no such target"
    assert "rank 1 said: ValueError: no such target" in other


def test_a_state_dict_that_fails_on_one_rank_fails_on_all_at_once(two_ranks: Ranks) -> None:
    other, own = two_ranks.run(model_waves.state_dict_fails)
    assert own == "OSError: no room"
    assert other.startswith("PeerLost")
    assert "rank 1 said: OSError: no room" in other


def test_closed_waves_and_settings_that_do_nothing_say_so(two_ranks: Ranks) -> None:
    for rank, told in enumerate(two_ranks.run(model_waves.used_after_they_were_closed)):
        *warnings, step, predict, state_dict = told
        for said, name in ((step, "step"), (predict, "predict"), (state_dict, "state_dict")):
            assert said == f"rank {rank}: {name}() of closed ModelWaves; make new ones"
        unused = "enabled = False (code), compression = 'fp16' (code)"
        assert warnings == ([] if rank else [f"bytesched: ModelWaves does not use {unused}"])
