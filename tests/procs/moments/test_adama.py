"""AdamA: gradients that are folded into Adam's moments, against one process that does the same."""

from __future__ import annotations

from typing import Any

import adama_cases as cases
import pytest
from raised import check_survivors
from ranks import Ranks, run_fresh

#: of numbers of float64, summed in another order
ROUNDING = 1e-12


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1, "betas": (0.8, 0.99)}, {"amsgrad": True}, {"maximize": True}],
    ids=str,
)
@pytest.mark.one_in(2)
def test_equals_one_process(kind: str, options: dict[str, Any], two_ranks: Ranks) -> None:
    assert max(two_ranks.run(cases.equals_alone, kind, options, 3, "", {})) < ROUNDING


@pytest.mark.parametrize("how", ["ddp", "ddp no_sync", "closure", "zeros"])
def test_however_a_script_accumulates(how: str, three_ranks: Ranks) -> None:
    assert max(three_ranks.run(cases.equals_alone, "AdamW", {}, 4, how, {})) < ROUNDING


@pytest.mark.parametrize(
    "settings",
    [
        {"cross_barrier": False},
        {"policy": "fifo"},
        {"partition_bytes": 0, "credit_bytes": 0},
        {"hierarchy": "on"},
        {"tune": True, "tune_steps": 40, "partition_bytes": 0, "credit_bytes": 0},
    ],
    ids=str,
)
def test_with_settings(settings: dict[str, Any], two_ranks: Ranks) -> None:
    assert max(two_ranks.run(cases.equals_alone, "AdamW", {}, 2, "", settings)) < ROUNDING


def test_one_micro_batch(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(cases.equals_alone, "Adam", {}, 1, "", {})) < ROUNDING


def test_a_checkpoint_goes_on_as_if_nothing_had_been(two_ranks: Ranks) -> None:
    for same, same_state, keys in two_ranks.run(cases.goes_on_from_a_checkpoint):
        assert same
        assert same_state
        assert keys == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]


def test_no_gradient_outlives_its_layer() -> None:
    for rank in run_fresh(cases.most_elements, timeout_s=60):
        assert rank.code == 0, rank.stderr
        most, elements, layer = map(int, rank.stdout.split())
        # Of the moments, what moves to its arena is there twice for once; of a layer, its gradient.
        assert most < 2 * elements + 2 * layer + 1000, (most, elements)


def test_a_model_ends_with_the_last_reference_to_it(two_ranks: Ranks) -> None:
    assert two_ranks.run(cases.is_let_go_of) == [True, True]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("SGD", "PluginError: accumulate='adama' folds gradients into the moments of Adam"),
        ("left out", "parameter '0.weight' requires a gradient, and is not in the optimizer"),
        ("shard", "PluginError: shard = True cannot be for this model: "),
        ("split", "accumulate='adama' and split = 'on'"),
        ("compression", "accumulate='adama' and compression = 'bf16': moments are kept"),
        ("unused", "accumulate='adama' and find_unused_parameters = True"),
        ("micro_batches", "ConfigError: micro_batches = 0"),
        ("accumulate", "ConfigError: accumulate = 'adamb'"),
        ("micro_batches alone", "ConfigError: micro_batches = 2 without accumulate"),
        ("clip", "the gradient of '0.weight' has been folded into Adam's moments and released"),
        ("clip after another pass", "the gradient of '0.weight' has been folded into Adam's"),
        ("read", "the gradient of '0.weight' has been folded into Adam's moments and released"),
        ("scaler", "has been folded into Adam's moments and released"),
        ("early", "step() came after 1 backward passes on rank"),
        ("late", "got another gradient on rank"),
        ("ahead", "are this rank's alone (rank"),
        ("ahead later", "are this rank's alone (rank"),
        ("save", "the optimizer's state was asked for inside a mini-batch, after 1 of 2"),
        ("another", "one optimizer has all parameters of the model"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(case: str, told: str, two_ranks: Ranks) -> None:
    for found in two_ranks.run(cases.refused, case):
        assert told in found


def test_a_rank_that_dies_in_a_mini_batch_is_named() -> None:
    check_survivors(run_fresh(cases.dies_in_a_mini_batch, world_size=3, timeout_s=60))
