"""Two pipelines of two ranks: stages that are replicated train as if reduced at the end.

What cannot be wrapped is refused on all ranks; what fails in a step is told to the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_cases import (
    crosses_the_barrier,
    ddp_alone,
    ends_with_its_schedule,
    evaluated_by_another_schedule,
    follows_a_planned_order,
    optimizer_for_each_stage,
    trains_as_plain,
    trains_in_two_levels,
    trains_the_example,
    unchanged_script,
    unwrapped_in_the_middle,
)
from pipeline_faults import (
    ends_in_a_step,
    given_an_order,
    given_other_orders,
    loaded_after_wrap,
    misused,
    refused,
    wrapped_before_it_was_a_stage,
)
from pipeline_models import SPLIT
from ranks import Ranks, run_fresh

from bytesched.commands.pipeline import main

pytestmark = pytest.mark.procs

KINDS = [
    "gpipe",
    "1f1b",
    "gpipe, one micro-batch",
    "interleaved",
    "interleaved zb",
    "zbv",
    "dualpipev",
    "csv",
    "csv split",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(3)
def test_a_schedule_trains_as_reduced_at_the_end(kind: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(trains_as_plain, kind) == [[]] * 4


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zbv", "csv split"])
@pytest.mark.one_in(3)
def test_all_gradients_may_cross_the_barrier(kind: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(crosses_the_barrier, kind) == [[]] * 4


@pytest.mark.parametrize(
    "kind", ["gpipe on one rank", "interleaved on one rank", "csv split on one rank"]
)
@pytest.mark.parametrize("way", ["schedule", "ddp", "named"])
@pytest.mark.one_in(3)
def test_a_rank_may_have_all_stages(kind: str, way: str, two_ranks: Ranks) -> None:
    assert two_ranks.run(trains_as_plain, kind, way) == [[], []]


@pytest.mark.parametrize("kind", ["1f1b", "csv", "csv split"])
@pytest.mark.parametrize("way", ["ddp", "named", "modules"])
@pytest.mark.one_in(3)
def test_however_the_stages_are_given(kind: str, way: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(trains_as_plain, kind, way) == [[]] * 4


SCRIPTS = [
    "accumulates",
    "clips",
    "reads",
    "shares",
    "leaves out",
    "keeps zeros",
    "has a closure",
    "sums losses",
    "is frozen in part",
    "is in bfloat16",
    "scales losses",
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", ["csv", "csv split"])
@pytest.mark.one_in(4)
def test_whatever_the_script_does_between(kind: str, script: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(trains_as_plain, kind, "schedule", script) == [[]] * 4


@pytest.mark.parametrize(
    "fields", [{"tune": True, "partition_bytes": 0, "credit_bytes": 0}, {"policy": "fifo"}]
)
@pytest.mark.parametrize("script", ["", "clips"])
@pytest.mark.one_in(3)
def test_whatever_carries_the_gradients(
    fields: dict[str, Any], script: str, four_ranks: Ranks
) -> None:
    found = four_ranks.run(trains_as_plain, "csv split", "schedule", script, "adamw", fields)
    assert found == [[]] * 4


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["csv", "csv split"])
@pytest.mark.one_in(4)
def test_compressed_as_by_hooks_of_ddp(kind: str, wire: str, four_ranks: Ranks) -> None:
    fields = {"compression": wire}
    found = four_ranks.run(trains_as_plain, kind, "schedule", f"sends {wire}", "momentum", fields)
    assert found == [[]] * 4


@pytest.mark.parametrize("kind", ["gpipe on one rank", "csv split on one rank"])
@pytest.mark.one_in(2)
def test_in_two_levels(kind: str, four_ranks: Ranks) -> None:
    four_ranks.run(trains_in_two_levels, kind)


def test_what_torch_does_without_it(four_ranks: Ranks) -> None:
    """If this fails, DDP has learned to reduce weight gradients that are computed apart."""
    assert max(four_ranks.run(ddp_alone, "csv")) < 1e-6
    assert max(four_ranks.run(ddp_alone, "csv split")) > 1e-2


@pytest.mark.parametrize("kind", ["1f1b", "csv split"])
@pytest.mark.one_in(2)
def test_under_bytesched_run(kind: str) -> None:
    for rank in run_fresh(unchanged_script, 4, 60, {"BYTESCHED_PARTITION_BYTES": "256"}, (kind,)):
        assert rank.code == 0, rank.stderr
        assert rank.stdout == "cross True\n", rank.stderr
        assert ("it reduces none of them" in rank.stderr) == (kind == "csv split")


@pytest.mark.parametrize("kind", ["1f1b", "csv split"])
@pytest.mark.one_in(2)
def test_unwrapped_in_the_middle(kind: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(unwrapped_in_the_middle, kind) == [True] * 4


def test_a_session_ends_with_its_schedule(four_ranks: Ranks) -> None:
    assert four_ranks.run(ends_with_its_schedule) == [([], False)] * 4


def test_an_optimizer_for_each_stage_and_evaluation(four_ranks: Ranks) -> None:
    assert four_ranks.run(optimizer_for_each_stage) == [True] * 4


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.one_in(2)
def test_the_example(searched: bool, four_ranks: Ranks, tmp_path: Path) -> None:
    order = tmp_path / "order.csv"
    order.write_text("".join(f"{row}\n" for row in SPLIT))
    found = four_ranks.run(trains_the_example, str(order) if searched else "", str(tmp_path))
    assert found == [True] * 4


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.one_in(3)
def test_another_schedule_evaluates(when: str, four_ranks: Ranks) -> None:
    assert four_ranks.run(evaluated_by_another_schedule, when) == [True] * 4


@pytest.mark.parametrize("options", ["", "--split-backward", "--placement interleaved"])
@pytest.mark.one_in(3)
def test_torch_runs_a_planned_order_unchanged(
    options: str, four_ranks: Ranks, tmp_path: Path
) -> None:
    path, profile = tmp_path / "order.csv", tmp_path / "stages.json"
    profile.write_text(json.dumps({"stages": [{"forward_s": 1e-3, "backward_s": 2e-3}] * 4}))
    given = f"--profile {profile} --ranks 2 --micro-batches 4 --time-limit-s 10 --csv {path}"
    assert main(["plan", *given.split(), *options.split()]) == 0
    assert max(four_ranks.run(follows_a_planned_order, str(path))) < 1e-6


#: what is wrong -> what each rank is told
TOLD = {
    "another placement": "MismatchError: rank 0 has stages 0, 3 of 4, rank 2 has stages 0, 2 of 4",
    "another order": "MismatchError: the ranks disagree: ",
    "other values": "begin with different values",
    "one stage in DDP": "PluginError: 1 of 2 stages on rank ",
    "never reduced": "PluginError: the order of _PipelineScheduleRuntime never reduces stage ",
    "some modules": "PluginError: _PipelineScheduleRuntime has 2 stages on this rank, and 1 ",
    "shared device": "PluginError: share = 'jobs' is not there for pipelines",
    "folded": "PluginError: accumulate is not there for pipelines",
    "off": "PluginError: nothing would reduce the gradients of replicated stages: enabled is off",
    "off, in DDP": "no error",
    "a hook of DDP": "a communication hook is registered on the DDP module; stage ",
    "DDP's mixed precision": "wrapped: DDP's own mixed precision reduces in a hook of its own",
    "delayed by DDP": "wrapped: DDP delays the all-reduce of some parameters",
    "FSDP": " is sharded by FSDP, which reduces gradients itself",
    "FSDP, named": " is sharded by FSDP, which reduces gradients itself",
    "FSDP1": " is sharded by FSDP, which reduces gradients itself",
    "a DTensor": ".up.bias is a DTensor, of which each rank has a part: ",
    "a DTensor, named": ".up.bias is a DTensor, of which each rank has a part: ",
    "sparse": " rank 2 cannot be wrapped: stage",
    "a mapping": "PluginError: groups is a dict: for a pipeline it is the process group",
}


@pytest.mark.parametrize("what", TOLD)
def test_what_cannot_be_wrapped(what: str, four_ranks: Ranks) -> None:
    said = four_ranks.run(refused, what)
    for text in said:
        assert TOLD[what] in text


def test_a_pipeline_without_replicas_has_one_order(four_ranks: Ranks) -> None:
    said = four_ranks.run(refused, "another order, no replicas")
    assert said[:2] == ["no error", "no error"]
    assert all(text.startswith("MismatchError: the ranks disagree: ") for text in said[2:]), said


def test_ranks_that_read_other_orders(four_ranks: Ranks) -> None:
    said = four_ranks.run(given_other_orders)
    assert said[:2] == ["no error", "no error"]
    for text in said[2:]:
        assert text.startswith("MismatchError: the ranks disagree: rank "), said
        assert " has 'an order of 4 stages and 2 micro-batches with digest " in text


def test_an_order_that_all_ranks_load_after_wrap(four_ranks: Ranks, tmp_path: Path) -> None:
    assert four_ranks.run(loaded_after_wrap, "all", str(tmp_path)) == ["no error"] * 4


def test_ranks_that_load_other_orders_after_wrap(four_ranks: Ranks, tmp_path: Path) -> None:
    said = four_ranks.run(loaded_after_wrap, "one", str(tmp_path))
    assert all(text.startswith("MismatchError: the ranks disagree: ") for text in said[2:]), said
    assert all(text.startswith("PeerLost: ") for text in said[:2]), said


def test_a_module_that_became_a_stage_is_refused_when_it_is_called() -> None:
    first, _, third, _ = run_fresh(wrapped_before_it_was_a_stage, 4, 60)
    for rank in (first, third):
        assert rank.code == 0, rank.stderr
        assert "was wrapped alone, and is a stage of a pipeline now" in rank.stdout, rank.stderr


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_a_rank_that_ends_in_a_step(how: str) -> None:
    first, second, third, last = run_fresh(ends_in_a_step, 4, 60, args=(how,))
    # Replicas, and then what the first of them has left behind.
    assert first.stdout.startswith("PeerLost: "), first
    assert "is gone" in first.stdout
    assert second.stdout.startswith("PeerLost: "), second
    assert last.stdout.startswith("PeerLost: rank of this pipeline, 2, is gone ("), last
    assert third.stdout == ("ValueError: the weather\n" if how == "raises" else "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0,oops\n", "row 2, cell 2"),
        ("0F0,0B0,1F0,1B0,2F0,2B0,3F0,3B0\n", "ConfigError: "),
        ("0F0,0B0\n1F0,1B0\n", "is of 2 stages, and the model was cut into 4"),
        (
            "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n",
            "has stages 0, 2 on rank 0 of the pipeline, which was given stages 0, 3",
        ),
        ("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", "no error"),
    ],
)
def test_a_foreign_order(text: str, said: str, four_ranks: Ranks, tmp_path: Path) -> None:
    first, *_ = four_ranks.run(given_an_order, text, str(tmp_path / "order.csv"))
    assert said in first


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("custom function", "was not reduced on rank"),
        ("another schedule", "runs in another schedule than the one that was wrapped"),
        ("another module", "its module was replaced, by a Sequential"),
        ("thawed", "parameters have gradients that required none when it was wrapped"),
    ],
)
@pytest.mark.one_in(2)
def test_what_would_not_be_reduced_is_an_error(how: str, said: str) -> None:
    ended = run_fresh(misused, 4, 60, args=(how,))
    assert any(said in rank.stdout for rank in ended), ended
    # Who hears of it from its replicas first has their error; from its pipeline, that of torch.
    for rank in ended:
        is_named = rank.stdout.startswith(("PluginError: ", "PeerLost: "))
        assert is_named or "by peer" in rank.stderr, ended
