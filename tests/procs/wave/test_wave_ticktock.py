"""Tick-tock: the results of gradient accumulation, whatever the waves share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks, run_fresh
from wave_cases import (
    ddp_equal,
    left_to_accumulation,
    peer_dies,
    refused_where_nothing_sends,
    seldom_used_under_wrap,
    switched_off,
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- on several ranks ----------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True], ids=["ddp", "bytesched"])
@pytest.mark.parametrize("waves", [2, 3])
def test_ranks_equal_accumulation(two_ranks: Ranks, waves: int, wrapped: bool) -> None:
    assert two_ranks.run(ddp_equal, waves, wrapped) == [[], []]


@pytest.mark.parametrize("wrapped", [False, True], ids=["ddp", "bytesched"])
def test_ranks_clip_what_all_waves_and_ranks_came_to(two_ranks: Ranks, wrapped: bool) -> None:
    assert two_ranks.run(ddp_equal, 2, wrapped, True) == [[], []]


def test_ranks_that_are_switched_off_accumulate(two_ranks: Ranks) -> None:
    for wrong, said in two_ranks.run(switched_off):
        assert wrong == []
        assert "nothing synchronises the gradients of the 2 ranks, and enabled is off" in said


def test_ddp_that_looks_for_unused_parameters_accumulates(two_ranks: Ranks) -> None:
    assert two_ranks.run(left_to_accumulation) == [(False, []), (False, [])]


def test_parameters_of_an_early_wave_alone_are_averaged(two_ranks: Ranks) -> None:
    assert two_ranks.run(seldom_used_under_wrap) == [[], []]


def test_ranks_that_would_train_apart_are_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(refused_where_nothing_sends):
        assert "nothing synchronises the gradients of the 2 ranks" in message


def test_a_rank_that_dies_in_a_wave_is_a_named_error() -> None:
    survivor, dead = run_fresh(peer_dies, timeout_s=40)
    assert dead.code == -9
    assert survivor.stdout.strip() == "PeerLost", survivor.stderr
    assert survivor.code == 0
